"""Tokenizer, chat template and stop ids, read from the files of a checkpoint and written back to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvjax.errors import InputError
from kvjax.models.files import read_json
from kvjax.models.model import Model

# repeat_prompt is kvjax's own: what asks this model to repeat its context (KVzip's probe).
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "repeat_prompt")


class Text(NamedTuple):
    """What a checkpoint says about text; the fields are those of `Model`."""

    tokenizer: Tokenizer | None
    chat_template: str | None
    stop_ids: tuple[int, ...]
    special_tokens: dict[str, str]


def read_text(folder: Path) -> Text:
    """Reads the tokenizer's files of a checkpoint; each of them may be absent.

    Raises InputError where one is present and broken.
    """
    tokenizer, file = None, folder / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{file} is no tokenizer that `tokenizers` can read ({error})") from error
    settings, config, generation = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    special = {name: text for name in _SPECIAL if (text := _token_text(settings.get(name)))}
    text_config = config.get("text_config")
    sources = (generation, config, text_config if isinstance(text_config, Mapping) else {})
    stops = {i for source in sources for i in _as_ids(source.get("eos_token_id"))}
    if tokenizer is not None and "eos_token" in special:
        stops |= set(_as_ids(tokenizer.token_to_id(special["eos_token"])))
    return Text(tokenizer, _read_template(folder, settings), tuple(sorted(stops)), special)


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _as_ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template


def write_text(model: Model, folder: Path) -> None:
    """Writes the tokenizer's files of a model, as far as it has them."""
    stops = list(model.stop_ids)
    if stops:
        _write_json(
            folder / "generation_config.json", {"eos_token_id": stops if len(stops) > 1 else stops[0]}
        )
    if model.chat_template is not None:
        (folder / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")
    if model.tokenizer is not None:
        model.tokenizer.save(str(folder / "tokenizer.json"))
    if model.tokenizer is not None or model.special_tokens:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
        _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# --- chat --------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training: renders them."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def render_chat(
    model: Model, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> str:
    """The text of a conversation in the model's own chat format; see `chat`."""
    if model.chat_template is None:
        raise InputError(f"{model.name} has no chat template: give it plain text, or load a chat model")
    # A template is a program from the network: the sandbox keeps it from touching anything but its arguments.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(model.chat_template).render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **model.special_tokens,
        )
    except TemplateError as error:
        raise InputError(
            f"the chat template of {model.name} does not accept these messages: {error}"
        ) from error


def chat(
    model: Model, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation, `messages` being dicts with "role" and "content", ready to be answered.

    Raises InputError where the model has no tokenizer or no chat template, or the template refuses.

    >>> from kvjax.loading import load  # doctest: +SKIP
    >>> model = load("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    >>> ids = chat(model, [{"role": "user", "content": "Name a prime."}])  # doctest: +SKIP
    """
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json: put one beside its weights, or pass token ids")
    text = render_chat(model, messages, add_generation_prompt)
    # The template writes every special token itself.
    return model.tokenizer.encode(text, add_special_tokens=False).ids
