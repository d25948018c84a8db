"""The `kvjax` command: parses arguments, runs a subcommand, reports wrong input in one line (exit code 2)."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from kvjax.base.errors import InputError
from kvjax.base.interrupts import Interrupts, folder_to_resume
from kvjax.base.streams import escaped, printable, silence

COMMANDS = (
    "compare", "report", "methods", "architectures", "explain", "generate", "shorten", "get", "fit", "train",
    "convert", "uptrain", "inspect", "info", "aot", "plan", "serve", "simulate",
    "systems", "lm-eval",
)  # fmt: skip
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
# Errors of a write to a full or failing disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `--help` and `--version` raise SystemExit.

    >>> main(["methods", "--jsn"])
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with printable(), Interrupts(lambda: os._exit(_end(_interrupted(words)))) as interrupts:
        code = _end(_answered(words, interrupts))
    if argv is None and code == INTERRUPTED:
        # Without this, the process would wait for threads that still compile.
        os._exit(code)
    return code


def _answered(words: list[str], interrupts: Interrupts) -> int:
    """Run the command line, and report errors."""
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted(words)
    except BrokenPipeError:
        silence(sys.stdout)
        return BROKEN_PIPE
    except Exception as error:
        if interrupts.came():  # jax and other libraries turn an interrupt into an exception of theirs
            return _interrupted(words)
        return _explained(words, error)


def _explained(words: list[str], error: Exception) -> int:
    """Print errors that the user can correct; raise all others again."""
    if isinstance(error, InputError):
        return _complain(str(error))
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        silence(sys.stdout)
        return _complain(
            f"the output could not be written ({error.strerror}): write it elsewhere, or free some space"
        )
    if isinstance(error, ValueError):
        # kvjax raises ValueError with a message for the user. A ValueError of another library is a bug.
        if _deliberate(error.__traceback__):
            return _complain(f"{error}: see `kvjax {words[0]} --help`")
    raise error


def _interrupted(words: list[str]) -> int:
    """Report that the command was interrupted, and which command line resumes it."""
    folder = folder_to_resume()
    if folder is None:
        return _tell("interrupted", INTERRUPTED)
    given = [word for word in words if word != "--resume"]
    out = [] if any(word.split("=")[0] == "--out" for word in given) else ["--out", str(folder)]
    line = shlex.join(["kvjax", *given, *out, "--resume"])
    return _tell(f"interrupted; what was done is in {folder}. Go on with: {line}", INTERRUPTED)


def _run(words: list[str]) -> int:
    parser = make_parser()
    if not words:
        parser.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "see `kvjax --help`"
        raise InputError(f"unknown command {words[0]!r}, expected one of {', '.join(COMMANDS)}: {hint}")
    args, unknown = parser.parse_known_args(words)
    if unknown and getattr(args, "passes_on", False):
        args.rest = unknown
    elif unknown:
        asked = getattr(args, "parser", parser)
        options = re.findall(r"--[a-z-]+", asked.format_help())
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
        hint = f"did you mean {near[0]}?" if near else f"see `{asked.prog} --help`"
        raise InputError(f"unknown argument {unknown[0]!r}, expected those of `{asked.prog}`: {hint}")
    return _run_on_hosts(args) or 0


def _run_on_hosts(args: argparse.Namespace) -> int | None:
    """Run the command, together with other hosts if `--hosts` or the environment says so."""
    if not hasattr(args, "hosts") or not (args.hosts or os.environ.get("KVJAX_HOSTS")):
        if any(getattr(args, name, None) is not None for name in ("process", "processes")):
            raise InputError("--processes or --process was given without --hosts: add --hosts ADDRESS:PORT")
        return args.run(args)
    from kvjax.hosts.messages import is_first
    from kvjax.hosts.start import start_hosts

    # Libraries may write to the process's standard output, which is for the command's own output.
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    os.dup2(2, 1)
    start_hosts(args.hosts, args.processes, args.process, wait_seconds=args.wait)
    if not is_first():
        sys.stdout = open(os.devnull, "w")
    return args.run(args)


def _end(code: int) -> int:
    """Return a command's exit code; if it failed and other hosts wait, tell them and exit at once."""
    watch = sys.modules.get("kvjax.hosts.watch")
    if code and watch is not None and watch.joining.is_set():
        watch.leave(code)
    return code


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of every subcommand; each one's `run` is in its namespace."""
    parser = _Parser(
        prog="kvjax",
        description="KV-cache compression for decoders: run methods, compare them, look inside.",
        epilog="Start with: kvjax compare. Each command has its own --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        module = importlib.import_module(f"kvjax.commands.{name.replace('-', '_')}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=textwrap.fill(f"{module.HELP[0].upper()}{module.HELP[1:]}.", 79),
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises InputError for wrong arguments, as everything else does, and takes no abbreviated options."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}: see `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import kvjax

        print(f"kvjax {kvjax.__version__}")
        parser.exit()


def _complain(message: str) -> int:
    line = escaped("kvjax: error: " + " ".join(message.split()))
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return _tell(f"\x1b[31m{line}\x1b[0m" if red else line, BAD_INPUT)


def _tell(line: str, code: int) -> int:
    """Print a line on standard error, if possible, and return the exit code."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
    return code


def _deliberate(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is kvjax's or a user's method: then the message is for the user."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return name.startswith(("kvjax.", "kvjax_user_"))
