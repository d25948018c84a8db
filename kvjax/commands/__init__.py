"""The subcommands of `kvjax`, one file each: its arguments and what it prints; the work is the library's.

Every file has HELP, EXAMPLE, add_arguments(parser) and run(args). None imports jax or numpy before it runs, so that
`--help` and misspelt arguments answer at once.
"""
