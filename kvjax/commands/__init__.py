"""The subcommands of `kvjax`, one file each, with its arguments and output; the library does the work.

A command's file has HELP, EXAMPLE, add_arguments(parser) and run(args), and imports jax only when it runs, so
that `--help` and misspelt arguments are answered at once; `<command>_*.py` beside it hold the code that needs
jax.
"""
