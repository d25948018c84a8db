"""The page of the command line: the help text of every command."""

from __future__ import annotations

import argparse
from functools import partial

from kvjax.commands.main import COMMANDS, make_parser


def page() -> str:
    """Write a section per command, with the output of `--help` in a terminal of 90 columns."""
    [choices] = [
        action.choices for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    for parser in choices.values():
        parser.formatter_class = partial(parser.formatter_class, width=90)
    sections = [
        f"## kvjax {name}\n\n```text\n{choices[name].format_help().rstrip()}\n```" for name in COMMANDS
    ]
    return "\n\n".join(["# Commands", *sections]) + "\n"
