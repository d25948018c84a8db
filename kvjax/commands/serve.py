"""`kvjax serve`: answers requests on this machine, from a trace (`run`) or over HTTP (`http`)."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from functools import partial
from typing import Any

from kvjax.commands.options import add_dtype, add_model, whole
from kvjax.commands.programs import keep_programs
from kvjax.commands.serve_load import compare_arguments, load_arguments, run_compare, run_over_http
from kvjax.commands.serve_requests import add_load, api_key, asked_of, prompts_of, served

HELP = "serve requests on this machine under a serving system's policies, with methods that compress"
EXAMPLE = """examples:
  kvjax serve run --system vllm --synthetic tree:requests=20,prefix=48,suffix=16,output=12 --check
  kvjax serve run --system "sarathi(tokens=64)" --method "keydiff(budget=0.5)" --method full \\
      --synthetic azure-conv:requests=20,rate=100 --scale 32

  kvjax serve compare --system orca --system sarathi --synthetic azure-conv:requests=20,rate=100 --scale 32
  kvjax serve load --url http://127.0.0.1:8000 --synthetic azure-conv:requests=20,rate=5 --scale 32
  kvjax serve http --model smollm2-135m --method int8 --system sarathi

Every request gives the tokens of `kvjax generate` alone, whatever the system does: --check compares them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="run|compare|http|load", required=True)
    kinds = {
        "run": ("requests of a trace, or drawn ones", _run_arguments, run_load),
        "compare": ("several systems on the same requests, in one table", compare_arguments, run_compare),
        "http": ("OpenAI's completions and chats over HTTP", _http_arguments, run_http),
        "load": ("send requests to a server, and print latencies", load_arguments, run_over_http),
    }
    for name, (about, arguments, function) in kinds.items():
        one = commands.add_parser(
            name, help=about, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        arguments(one)
        one.set_defaults(serve=function, parser=one)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_dtype(parser)
    add("--system", default="vllm", metavar="SYSTEM", help="as vllm or sarathi(tokens=256) (default: vllm)")
    add(
        "--method", action="append", metavar="METHOD",
        help="of all requests; given again, requests take turns (default: the full cache)",
    )  # fmt: skip
    add_load(parser)
    add("--pages", type=whole(1), metavar="N", help="pages of the pool (default: for all that run at once)")
    add(
        "--record", metavar="FILE",
        help="write what the iterations took, for `kvjax simulate --costs`",
    )  # fmt: skip
    add("--check", action="store_true", help="compare every answer with `kvjax.generate` alone")


def _http_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_dtype(parser)
    add("--system", default="sarathi", metavar="SYSTEM", help="see `kvjax systems` (default: sarathi)")
    add("--method", metavar="METHOD", help="of all requests (default: the full cache)")
    add("--name", metavar="NAME", help="what clients call the model (default: --model)")
    add("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s, this machine)")
    add("--port", type=whole(0), default=8000, metavar="N", help="(default: %(default)s; 0: any free one)")
    add("--api-key", metavar="KEY", help="the bearer token that clients must send (default: $KVJAX_API_KEY)")
    add("--context", type=whole(2), metavar="N", help="tokens of a prompt and its answer (default: 2048)")
    add("--rows", type=whole(1), default=16, metavar="N", help="requests at a time (default: %(default)s)")
    add("--pages", type=whole(1), metavar="N", help="pages of the pool (default: --context for --rows)")
    add(
        "--waiting", type=whole(1), default=256, metavar="N",
        help="requests that may be under way; more are turned away (default: %(default)s)",
    )  # fmt: skip
    add("--max-bytes", type=whole(1), default=2**20, metavar="N", help="of a body (default: %(default)s)")
    add(
        "--drain", type=whole(0), default=30, metavar="SECONDS",
        help="for answers under way, after SIGTERM (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int | None:
    return args.serve(args)


def run_load(args: argparse.Namespace) -> int:
    from kvjax.base.atomic_files import check_file, write_named
    from kvjax.commands.simulate import slo_of
    from kvjax.commands.terminal import console, tracked
    from kvjax.io.load import load
    from kvjax.serve.load.metrics import metrics
    from kvjax.serve.systems import system

    chosen, slo = system(args.system), slo_of(args.slo)
    check_file(args.record)
    asked = asked_of(args)
    keep_programs()
    model, methods = load(args.model, dtype=args.dtype), args.method or ["full"]
    requests = prompts_of(model, asked, methods)
    done, late = served(model, requests, chosen, "serving", pages=args.pages, record=args.record is not None)
    if args.record:
        write_named(args.record, (json.dumps(done.measured) + "\n").encode())
    load_name, by = args.trace or args.synthetic, done.outcome.costs
    figures: dict[str, Any] = {"system": args.system, "simulated": False, "costs": by, "load": load_name}
    per_token = {method: done.page_bytes / tokens for method, tokens in done.tokens.items()}
    figures |= {"pages": done.pages, "page_bytes": done.page_bytes, "bytes_per_token": per_token}
    figures |= {"methods": methods, **metrics(done.outcome, slo)}
    figures["failed"] = sum(answer.state == "failed" for answer in done.answers)
    if args.check:
        from kvjax.serve.device.alone import compared

        shown = partial(tracked, description="generating alone", console=console())
        figures |= compared(model, requests, done.answers, shown)._asdict()
    figures["compiled_meanwhile"] = bool(late)
    _show(figures, args.json)
    if late:
        print(late, file=sys.stderr)
    return int(bool(figures["failed"] or figures.get("unequal")))


def _show(figures: dict[str, Any], as_json: bool) -> None:
    from kvjax.commands.simulate import COLUMNS
    from kvjax.commands.terminal import console, pairs

    if as_json:
        print(json.dumps(figures, indent=1))
        return
    rows = [("system", figures["system"]), ("methods", ", ".join(figures["methods"]))]
    rows += [("completed", str(figures["completed"])), ("failed", str(figures["failed"]))]
    for name, (field, form) in COLUMNS.items():
        if field in figures:
            unit = " ms" if field.endswith("_ms") else ""
            rows.append((field if unit else name, form.format(figures[field]) + unit))
    rows.append(("iterations", str(figures["iterations"])))
    for method, size in figures["bytes_per_token"].items():
        rows.append((f"bytes per token, {method}", f"{size:.0f}"))
    if "equal" in figures:
        whole = figures["equal"] + figures["tied"] + figures["unequal"]
        tied = f", and {figures['tied']} up to a tie" if figures["tied"] else ""
        rows.append(("tokens of generate alone", f"{figures['equal']} of {whole}{tied}"))
    out = console()
    out.print(pairs(rows), highlight=False)
    out.print(f"{figures['costs']}; {figures['load']}.", highlight=False, style="dim")


def run_http(args: argparse.Namespace) -> None:
    from kvjax.base.errors import InputError

    try:
        import uvicorn

        from kvjax.serve.http.app import app_of
        from kvjax.serve.http.draining import Draining
    except ImportError as error:
        raise InputError(
            f"kvjax serve http needs {error.name}, which is not installed: pip install 'kvjax[serve]'"
        ) from error
    with _socket(args.host, args.port) as listening:
        service = _service(args)
        app = app_of(service, args.name or args.model, key=api_key(args), most_bytes=args.max_bytes)
        config = uvicorn.Config(app, log_level="info", ws="none")
        host, port, *_ = listening.getsockname()
        print(f"running on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
        Draining(config, service, args.drain).run(sockets=[listening])


def _socket(host: str, port: int) -> socket.socket:
    """Open a socket that listens there; InputError if it cannot, before the model is loaded."""
    from kvjax.base.errors import InputError

    if port > 65535:
        raise InputError(f"--port is {port}, expected one of 0 to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(
            f"nothing can listen at {host}:{port} ({error}): give another --host or --port (0: any free one)"
        ) from error


def _service(args: argparse.Namespace) -> Any:
    """Build the service of the command's options; wrong options are refused before it starts."""
    from kvjax.io.load import load
    from kvjax.methods import as_method
    from kvjax.pure import static
    from kvjax.serve.http.service import Limits, Service
    from kvjax.serve.policies.room import pages as pages_of
    from kvjax.serve.requests import Request
    from kvjax.serve.systems import system

    chosen = system(args.system)
    method = None if args.method is None else as_method(args.method)
    keep_programs()
    model = load(args.model, dtype=args.dtype)
    if method is not None and method.make is None:
        static(model, method)
    context = args.context or min(2048, model.config.max_positions)
    each = pages_of(chosen.place, Request(0, 0.0, context - 1, 1), context)
    limits = Limits(context, args.waiting, args.rows)
    return Service(model, chosen, args.pages or each * args.rows, limits, method)
