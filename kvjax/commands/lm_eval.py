"""`kvjax lm-eval`: lm-evaluation-harness's tasks over compressed caches, by the harness's own command."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.commands.options import add_dtype, add_mesh, add_model, mesh_options, whole
from kvjax.commands.programs import keep_programs

HELP = "answer tasks of lm-evaluation-harness over compressed caches"
EXAMPLE = """examples:
  kvjax lm-eval --model DIR --tasks hellaswag --limit 100 --batch_size 8
  kvjax lm-eval --model DIR --tasks gsm8k --method "snapkv(budget=0.25)" --apply_chat_template
  kvjax lm-eval --model DIR --tasks my_task --include_path my_tasks --output_path results \\
      --method "kvzip(budget=0.5)" --marker "Question:"

All other options are those of `lm-eval run`, such as --num_fewshot, --limit,
--batch_size, --include_path, --output_path, --log_samples, --gen_kwargs, --config.
Compressed is the context of a request: what stands before the last --marker, or
without one all tokens of the prompt but the last."""
# Options of the harness for which kvjax has others.
MODELS = ("--model_args", "-a", "-M", "--device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="see `lm-eval ls tasks`, or your own")
    add_model(parser)
    add_dtype(parser)
    parser.add_argument(
        "--method", metavar="METHOD", help='such as "snapkv(budget=0.25)" (default: the full cache)'
    )
    parser.add_argument(
        "--marker",
        metavar="TEXT",
        help="where a request's context ends and its question begins: at the last TEXT",
    )
    parser.add_argument("--drop-marker", action="store_true", help="take the marker out of the prompt")
    parser.add_argument(
        "--chunk", type=whole(1), metavar="N",
        help="in tasks of loglikelihood_rolling: compress again after every N tokens",
    )  # fmt: skip
    parser.add_argument(
        "--max-length",
        type=whole(2),
        metavar="N",
        help="tokens of a request (default: the model's positions)",
    )
    add_mesh(parser)
    parser.set_defaults(passes_on=True, rest=[])


def run(args: argparse.Namespace) -> None:
    _check(args)
    harness, given = _harness([*(["--tasks", *args.tasks] if args.tasks else []), *args.rest])
    given.model, given.model_args = "kvjax", _model_args(args)
    if given.output_path:
        _check_folder(Path(given.output_path))
    keep_programs()
    from kvjax.eval.harness.model import KvjaxLM  # noqa: F401  (the harness finds it by its name)

    with _explained():
        harness.execute(given)
    _print_bytes(given.model_args)


def _check(args: argparse.Namespace) -> None:
    """Raise InputError for wrong arguments, before anything is loaded."""
    if wrong := next((word for word in args.rest if word.split("=")[0] in MODELS), None):
        raise InputError(
            f"{wrong} was given, expected --model, --dtype and --method of kvjax, and JAX_PLATFORMS for the "
            "device: see `kvjax lm-eval --help`"
        )
    if args.drop_marker and args.marker is None:
        raise InputError("--drop-marker was given without a marker: add --marker TEXT")
    if args.method is not None:
        from kvjax.methods.parse import as_method

        as_method(args.method)
    mesh_options(args)
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'kvjax[lm-eval]'"
        ) from error


def _model_args(args: argparse.Namespace) -> dict[str, Any]:
    """Return a dict, because the harness's parser would split a method's text at its commas."""
    options = {
        "model": args.model, "method": args.method, "marker": args.marker, "drop_marker": args.drop_marker,
        "chunk": args.chunk, "dtype": args.dtype, "max_length": args.max_length, **mesh_options(args),
    }  # fmt: skip
    return {name: value for name, value in options.items() if value not in (None, False)}


def _harness(words: list[str]) -> tuple[Any, argparse.Namespace]:
    """Return the harness's own command-line object, and its parsed arguments."""
    from lm_eval._cli import HarnessCLI  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import setup_logging  # pyright: ignore[reportMissingImports]

    setup_logging()
    harness, said, before = HarnessCLI(), io.StringIO(), sys.argv
    sys.argv = ["lm-eval", "run", *words]
    try:
        with contextlib.redirect_stderr(said):
            return harness, harness.parse_args()
    except SystemExit as error:
        last = (said.getvalue().strip().splitlines() or [str(error)])[-1]
        raise InputError(f"lm-eval does not take these options ({last}): see `lm-eval run --help`") from error
    finally:
        sys.argv = before


def _check_folder(path: Path) -> None:
    """Raise InputError if results could not be written; the harness would fail only at the end."""
    folder = path.parent if path.suffix == ".json" else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output_path {path} cannot be made ({error.strerror}): give another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output_path {path} cannot be written: give another folder")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Errors of the harness about tasks and their data as InputError."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except InputError:
        raise
    except (DatasetsError, FileNotFoundError, ConnectionError) as error:
        raise InputError(
            f"a task's data cannot be had ({error}): where there is no network, use a task with data_files "
            "of this machine"
        ) from error
    except (ValueError, KeyError) as error:
        if not _of_harness(error):
            raise
        raise InputError(f"lm-eval: {error}; see `lm-eval ls tasks` and docs/tasks.md") from error


def _of_harness(error: BaseException) -> bool:
    """Whether the harness raised an error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("lm_eval.")


def _print_bytes(options: dict[str, Any]) -> None:
    from kvjax.commands.terminal import size
    from kvjax.eval.harness.rows import CacheBytes

    found, method = CacheBytes.newest, options.get("method", "full")
    if found is None or not found.requests:
        print(f"cache ({method}): not weighed, because every request was scored from its first token")
        return
    kept, full = (size(total // found.requests) for total in (found.kept, found.full))
    share = 100 * found.kept / found.full
    print(f"cache ({method}): {kept} a request, {share:.1f}% of the full cache's {full}, free slots included")
