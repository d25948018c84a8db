"""The subcommands of `kvjax`, one file each: its arguments and what it prints; the work is the library's.

A command's file has HELP, EXAMPLE, add_arguments(parser) and run(args), and imports jax only when it runs, so
that `--help` and misspelt arguments are answered at once; `<command>_*.py` beside it hold what needs jax.
"""
