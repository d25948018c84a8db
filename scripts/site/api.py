"""Pages of the public functions and classes, grouped by purpose; Sphinx fills them from docstrings."""

from __future__ import annotations

import re

# Every public name of `kvjax`, once; tests/docs/test_site.py compares with `kvjax.__all__`.
GROUPS = {
    "models": (
        "Models",
        "Model load spread prepare architectures architecture encode_context",
    ),
    "running": (
        "Prompts, steps and texts",
        "prefill parallel_contexts step generate speculate Lookup FirstCodes FewerSlots verify likelihood "
        "shorten LongText chat Sampler RepetitionPenalty FrequencyPenalty InputError",
    ),
    "methods": (
        "Methods",
        "method methods chain per_layer by_layer tiered in_chunks in_blocks merging while_decoding phased",
    ),
    "caches": (
        "Caches",
        "nbytes kept_positions kept_texts summary fork join take_rows reset_rows rollback "
        "save_cache load_cache send_cache receive_cache quality_in_time save_chat load_chat",
    ),
    "measuring": (
        "Comparing and fitting",
        "compare scores draw_scores fit fit_classifier fit_coder fit_links save_fitted load_fitted",
    ),
    "devices": ("Devices and hosts", "Rules shardings start_hosts fetch"),
}
MODULES = {
    "words": "For authors of methods: kvjax.words",
    "pure": "Inside your own jit: kvjax.pure",
    "nnx": "With flax: kvjax.nnx",
}


def pages() -> dict[str, str]:
    """Write the pages, by name."""
    found = {name: _page(title, names.split()) for name, (title, names) in GROUPS.items()}
    found |= {name: _module(name, title) for name, title in MODULES.items()}
    rows = [f"* [{title}]({name}.md): " + ", ".join(f"`{x}`" for x in names.split())
            for name, (title, names) in GROUPS.items()]  # fmt: skip
    rows += [f"* [{title}]({name}.md)" for name, title in MODULES.items()]
    toc = "\n".join(found)
    found["index"] = (
        "# Python reference\n\nAll of `import kvjax`, from its docstrings. `B` is the batch, `T` tokens, "
        "`S` slots, `K` KV heads, `N` query heads, `H` channels of a head, `V` the vocabulary.\n\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n"
    )
    return found


def _page(title: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", *map(_entry, names)]) + "\n"


def _entry(name: str) -> str:
    import kvjax

    kind = "class" if isinstance(getattr(kvjax, name), type) else "function"
    if name == "InputError":
        kind = "exception"
    members = ":members:\n" if kind == "class" else ""
    # `kvjax.methods` is a module that can be called.
    target = "kvjax.methods.methods" if name == "methods" else f"kvjax.{name}"
    return f"```{{eval-rst}}\n.. auto{kind}:: {target}\n{_indented(members)}```"


def _module(name: str, title: str) -> str:
    # InputError is listed among the functions only: a second entry would make links to it ambiguous.
    words = ":members:\n:imported-members:\n:exclude-members: InputError\n"
    options = words if name == "words" else ":members:\n"
    return f"# {title}\n\n```{{eval-rst}}\n.. automodule:: kvjax.{name}\n{_indented(options)}```\n"


def _indented(options: str) -> str:
    return "".join(f"   {line}\n" for line in options.splitlines())


def plain_docstring(lines: list[str]) -> list[str]:
    r"""Write a docstring for Sphinx: backticks become code; *, | and _ are escaped; examples are unchanged.

    >>> plain_docstring(["x*y of `room`", "", ">>> f(*a)"])
    ['x\\*y of ``room``', '', '>>> f(*a)']
    """
    made, example = [], False
    for line in lines:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        made.append(line if example else _plain(line))
    return made


def _plain(line: str) -> str:
    if "``" in line:
        return line
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        f"`{part}`" if part.startswith("`") and part.endswith("`") and len(part) > 2
        else re.sub(r"([*|`]|_(?=\W|$))", r"\\\1", part)
        for part in parts
    )  # fmt: skip
