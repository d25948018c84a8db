"""Chat template sandbox: a process that renders a request from standard input, within limits.

A template is a program from the network. Jinja's sandbox restricts it to its arguments; this
process, which imports nothing of kvjax, limits its time, its memory and its output.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from typing import Any, NoReturn

sys.path += sys.argv[1:]

from jinja2 import TemplateError, nodes  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training: renders them."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replace Jinja's own filter, which escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: str, values: dict[str, Any], most: int) -> str:
    """Render the text; TemplateError if it exceeds `most` characters."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.filters["tojson"] = _to_json
    pieces, size = [], 0
    for piece in environment.from_string(template).generate(**values):
        size += len(piece)
        if size > most:
            raise TemplateError(f"it wrote more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _bound(seconds: int, megabytes: int) -> None:
    """Set resource limits on this process, if the system supports them."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def main() -> None:
    """Read one request as JSON, and answer with {"text": ...} or {"error": ...}."""
    asked = json.load(sys.stdin)
    _bound(asked["seconds"], asked["megabytes"])
    try:
        answer = {"text": render(asked["template"], asked["values"], asked["characters"])}
    except MemoryError:
        answer = {"error": f"it took more than {asked['megabytes']} MiB"}
    except TemplateError as error:
        answer = {"error": str(error)}
    except Exception as error:  # a template's code may raise anything
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
