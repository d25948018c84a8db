"""The page of the command line: the help of every command."""

from __future__ import annotations

import argparse
import os

from kvjax.commands.main import COMMANDS, make_parser


def page() -> str:
    """A section for every command, with what `--help` prints in a terminal of 90 columns."""
    os.environ["COLUMNS"] = "90"
    [choices] = [
        action.choices for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    sections = [
        f"## kvjax {name}\n\n```text\n{choices[name].format_help().rstrip()}\n```" for name in COMMANDS
    ]
    return "\n\n".join(["# Commands", *sections]) + "\n"
