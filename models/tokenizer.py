"""Tokenizer, chat template and stop ids, read from and written to the files of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe
from tokenizers import Tokenizer

from kvjax.base.checks import check_text
from kvjax.base.errors import InputError
from kvjax.models.added_tokens import read_tokenizer
from kvjax.models.files import read_json
from kvjax.models.model import Model

# A key of kvjax's own: the prompt that asks the model to repeat its context (KVzip's probe).
_REPEAT = "repeat_prompt"
_JSON = ("tokenizer_config.json", "config.json", "generation_config.json")


class Text(NamedTuple):
    """The text data of a checkpoint; the fields are those of `Model`."""

    tokenizer: Tokenizer | None
    chat_template: str | None
    stop_ids: tuple[int, ...]
    special_tokens: dict[str, str]


def read_text(folder: Path) -> Text:
    """Read the tokenizer's files of a checkpoint; each of them may be absent.

    Raises InputError if one is present and broken.
    """
    settings, config, generation = (
        read_json(folder / name) if (folder / name).is_file() else {} for name in _JSON
    )
    tokenizer, special = read_tokenizer(folder, settings)
    if isinstance(asks := settings.get(_REPEAT), str):
        special[_REPEAT] = asks
    text_config = config.get("text_config")
    sources = (generation, config, text_config if isinstance(text_config, Mapping) else {})
    stops = {i for source in sources for i in _as_ids(source.get("eos_token_id"), tokenizer, folder)}
    if tokenizer is not None and "eos_token" in special:
        stops |= set(_as_ids(special["eos_token"], tokenizer, folder))
    return Text(tokenizer, _read_template(folder, settings), tuple(sorted(stops)), special)


def _as_ids(value: Any, tokenizer: Tokenizer | None, folder: Path) -> list[int]:
    """Parse the ids of an eos_token_id: a number, a token's text, or a list of them; -1 means none."""
    if isinstance(value, list):
        return [i for each in value for i in _as_ids(each, tokenizer, folder)]
    if isinstance(value, str) and tokenizer is not None:
        known = tokenizer.token_to_id(value)
        value = value if known is None else known
    if value is None or isinstance(value, int) and not isinstance(value, bool):
        return [value] if value is not None and value >= 0 else []
    raise InputError(
        f"eos_token_id in the files of {folder} is {value!r}, expected a token id, a list of them, or a "
        "token's text: correct config.json or generation_config.json"
    )


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Read the chat template; of several named ones, the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read as UTF-8 ({error}): fetch it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    if template is None or isinstance(template, str):
        return template
    raise InputError(
        f"chat_template in {folder / _JSON[0]} is {template!r:.60}, expected a text, or texts by name: "
        "correct the file"
    )


def write_text(model: Model, folder: Path) -> None:
    """Write the tokenizer's files of a model, if it has any."""
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
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
        if model.tokenizer is not None and model.tokenizer.encode_special_tokens:
            settings["split_special_tokens"] = True
        _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# --- chat --------------------------------------------------------------------------------------------


# Limits of a template: CPU seconds, wall-clock seconds, memory, characters of output.
SECONDS, PATIENCE, MEGABYTES, CHARACTERS = 10, 60, 2048, 2**24


def render_chat(model: Model, messages: Sequence[Any], add_generation_prompt: bool = True) -> str:
    """Render a conversation as text in the model's own chat format; see `chat`."""
    if model.chat_template is None:
        raise InputError(
            f"{model.name} has no chat template, or none named default: give it plain text, or load a model "
            "that chats"
        )
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(
            f"messages are {messages!r:.60}, expected a list of dicts: [{{'role': 'user', 'content': 'Hi'}}]"
        )
    special = {name: text for name, text in model.special_tokens.items() if name != _REPEAT}
    # transformers 5.24 drops None values, too: templates would print "None", or fail.
    given = [{key: x for key, x in message.items() if x is not None} for message in messages]
    values = {
        "messages": given, "add_generation_prompt": add_generation_prompt, "tools": None,
        "documents": None, **special,
    }  # fmt: skip
    limits = {"seconds": SECONDS, "megabytes": MEGABYTES, "characters": CHARACTERS}
    try:
        asked = json.dumps({"template": model.chat_template, "values": values, **limits})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"messages hold what JSON cannot say ({error}): give texts, lists and dicts"
        ) from error
    answer = _answered(asked)
    if "text" not in answer:
        raise InputError(
            f"the chat template of {model.name} does not accept these messages: {answer['error']}"
        )
    return answer["text"]


def _answered(asked: str) -> dict[str, str]:
    """Ask the sandbox, and return its response; see `kvjax.models.chat_sandbox`."""
    homes = dict.fromkeys(str(Path(package.__file__ or "").parents[1]) for package in (jinja2, markupsafe))
    command = [sys.executable, "-I", "-X", "utf8", str(Path(__file__).with_name("chat_sandbox.py")), *homes]
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    except OSError as error:
        return {"error": f"its process could not start ({error.strerror})"}
    except subprocess.TimeoutExpired:
        return {"error": f"it ran for more than {PATIENCE} seconds"}
    try:
        return json.loads(ran.stdout)
    except ValueError:
        # The system ends a process that exceeds its CPU seconds.
        slow = ran.returncode in (-24, -9)
        return {
            "error": f"it ran for more than {SECONDS} seconds"
            if slow
            else f"it ended with {ran.stderr[-200:]!r}"
        }


def chat(model: Model, messages: Sequence[Any], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation, `messages` being dicts with "role" and "content", ready to be answered.

    A key with value None, such as the content beside tool calls, is dropped from the message. Raises
    InputError if the model has no tokenizer or no chat template, or the template refuses.

    >>> from kvjax.io.load import load  # doctest: +SKIP
    >>> model = load("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    >>> ids = chat(model, [{"role": "user", "content": "Name a prime."}])  # doctest: +SKIP
    """
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json: put one beside its weights, or pass token ids")
    text = render_chat(model, messages, add_generation_prompt)
    check_text(text, "the conversation")
    # The template writes every special token itself.
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def text_ids(model: Model, text: str, special_tokens: bool = True) -> list[int]:
    """Encode a text as token ids. Raises InputError for one that the model's tokenizer has no tokens for.

    special_tokens: whether the tokenizer adds those that begin or end a text; a chat template has its own.

    >>> import kvjax
    >>> text_ids(kvjax.load("recall-tiny"), "<bos> 17")
    [1, 93]
    """
    try:
        return model.tokenizer.encode(text, add_special_tokens=special_tokens).ids
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"the tokenizer of {model.name} cannot read {text[-60:]!r} ({error}): use words that it knows"
        ) from error
