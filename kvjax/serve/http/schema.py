"""Request bodies: the fields of OpenAI's completions and chat completions, checked before anything runs."""

from __future__ import annotations

import difflib
import json
import secrets
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.api.sampling import Sampler
from kvjax.base.checks import check_in_vocabulary, check_text
from kvjax.base.errors import InputError
from kvjax.models.model import Model
from kvjax.models.tokenizer import render_chat, text_ids
from kvjax.serve.device.jobs import TOP, Prompt

# Fields that are not supported: by name, the only values that are accepted.
ONLY: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "use_beam_search": (None, False),
    "tool_choice": (None, "none", "auto"),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
READ = (
    "model", "prompt", "messages", "n", "best_of", "max_tokens", "max_completion_tokens", "temperature",
    "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "logprobs", "top_logprobs", "echo", "stream",
    "stream_options",
)  # fmt: skip
# Fields that change no answer.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls",
)  # fmt: skip
# The most answers to one prompt.
SAMPLES = 128


class UnknownModel(InputError):
    """A request names a model that is not served."""

    def __init__(self, given: Any, served: str):
        super().__init__(f"model is {given!r:.80}, expected {served!r}: this server has no other")


class CheckedBody(NamedTuple):
    """A checked request body: prompts that run in parallel, and how their answers are returned.

    prompts: `n` in a row for each given one, which differ in their keys. stops: the stop texts. logprobs: how
    many of the likeliest tokens are returned beside each token; None returns no log-probabilities. most: the
    most tokens of an answer; 0 asks for the prompts alone.
    """

    prompts: list[Prompt]
    n: int
    most: int
    chat: bool
    stream: bool
    usage: bool
    stops: list[str]
    logprobs: int | None
    echo: bool


def read_json(body: bytes) -> dict[str, Any]:
    """Read the JSON object of a body; InputError if it is none."""
    try:
        found = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON ({error}): send an object") from error
    if not isinstance(found, dict):
        raise InputError(f"the body holds a {type(found).__name__}, expected an object")
    return found


def asked(model: Model, name: str, body: dict[str, Any], chat: bool, context: int) -> CheckedBody:
    """Read and check a body. InputError names the field that cannot be used.

    name: of the served model. context: the most tokens of a prompt and its answer.
    """
    if body.get("model", name) != name:
        raise UnknownModel(body["model"], name)
    _check_fields(body)
    stream = _flag(body, "stream")
    echo, logprobs = _flag(body, "echo"), _logprobs(body, chat)
    if chat and echo:
        raise InputError("echo is of completions, not of chats: leave it out")
    texts = [_chat(model, body)] if chat else _prompts(model, body)
    for ids in texts:
        # Ids may have any number of digits; an array of objects has room for them.
        check_in_vocabulary(np.array(ids, object), model.config.vocab)
    sampler = Sampler(
        _number(body, "temperature", 1.0, 0.0, 1e6), top_k=max(_whole(body, "top_k", 0, -1) or 0, 0) or None,
        top_p=_number(body, "top_p", None, 0.0, 1.0), min_p=_number(body, "min_p", None, 0.0, 1.0),
    )  # fmt: skip
    n = _whole(body, "n", 1, 1, SAMPLES) or 1
    if _whole(body, "best_of", n, n) != n:
        raise InputError(f"best_of is {body['best_of']} and n is {n}: this server returns all that it draws")
    seed = _whole(body, "seed", None, -(2**63), 2**63 - 1)
    seed = secrets.randbits(31) if seed is None else seed
    most = _whole(body, "max_completion_tokens", None, 1) if chat else None
    most = _whole(body, "max_tokens", None, 0 if echo else 1) if most is None else most
    least = max(len(ids) for ids in texts)
    if most is None:
        most = max(1, context - least) if chat else 16
    stop: list[int] | None = [] if _flag(body, "ignore_eos") else None
    # max_tokens=0 asks for the log-probabilities of the prompt alone; the engine generates one token all the
    # same.
    prompts = [
        Prompt(ids, max(most, 1), sampler=sampler, key=_key(seed + i), stop=stop, top=logprobs or 0)
        for i, ids in enumerate(ids for ids in texts for _ in range(n))
    ]
    return CheckedBody(prompts, n, most, chat, stream, _usage(body), _stops(body), logprobs, echo)


def _check_fields(body: dict[str, Any]) -> None:
    """Raise InputError for a field that would change the answer, and that this server does not know."""
    for field, values in ONLY.items():
        if body.get(field) not in values:
            raise InputError(f"{field} is {body[field]!r:.80}, which this server does not do: leave it out")
    for field in body:
        if field not in {*ONLY, *READ, *IGNORED}:
            near = difflib.get_close_matches(field, READ, 1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise InputError(f"{field:.40} is no field that this server knows: {hint}")


def _key(seed: int) -> jax.Array:
    """Make the PRNG key of a seed; jax.random.key would drop the bits of long ones."""
    if 0 <= seed < 2**31:
        return jax.random.key(seed)
    return jax.random.fold_in(jax.random.key(seed % 2**31), seed // 2**31 % 2**32)


def _usage(body: dict[str, Any]) -> bool:
    """Whether a stream ends with the counts of tokens."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InputError(
            f"stream_options is {options!r:.80}, expected an object, as {{'include_usage': true}}"
        )
    return _flag(options or {}, "include_usage")


def _prompts(model: Model, body: dict[str, Any]) -> list[list[int]]:
    given = body.get("prompt")
    if isinstance(given, str):
        return [encoded(model, given)]
    if isinstance(given, list) and given:
        if all(_is_id(one) for one in given):
            return [given]
        if all(isinstance(one, str) for one in given):
            return [encoded(model, one) for one in given]
        if all(isinstance(one, list) and one and all(map(_is_id, one)) for one in given):
            return given
    raise InputError(
        f"prompt is {given!r:.80}, expected a text, a list of texts, or token ids of one or more prompts"
    )


def _is_id(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def encoded(model: Model, text: str) -> list[int]:
    """Encode a text as token ids; InputError if it has none."""
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer: send the prompt as token ids")
    check_text(text, "the prompt")
    ids = text_ids(model, text)
    if not ids:
        raise InputError("prompt is empty, expected at least one token")
    return ids


def _chat(model: Model, body: dict[str, Any]) -> list[int]:
    if model.tokenizer is None or model.chat_template is None:
        raise InputError(f"{model.name} has no chat template: ask /v1/completions for plain text")
    messages = body.get("messages")
    rows = messages if isinstance(messages, list) else []
    if not rows or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in rows):
        raise InputError(f"messages is {messages!r:.80}, expected a list of objects with role and content")
    said = [{"role": one["role"], "content": _content(one.get("content"))} for one in rows]
    text = render_chat(model, said)
    check_text(text, "the conversation")
    return text_ids(model, text, special_tokens=False)


def _content(given: Any) -> str:
    """Read the text of a message, which may be split into parts."""
    if isinstance(given, str):
        return given
    parts: list[Any] = given if isinstance(given, list) else [None]
    texts = [str(one["text"]) for one in parts if _is_text(one)]
    if len(texts) < len(parts):
        raise InputError(f"content is {given!r:.80}, expected a text: this server reads nothing else")
    return "".join(texts)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _stops(body: dict[str, Any]) -> list[str]:
    given = body.get("stop")
    found = [given] if isinstance(given, str) else [] if given is None else given
    if (
        not isinstance(found, list)
        or not all(isinstance(one, str) and one for one in found)
        or len(found) > 16
    ):
        raise InputError(
            f"stop is {given!r:.80}, expected a text or a list of at most 16, none of them empty"
        )
    return found


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    name = "top_logprobs" if chat else "logprobs"
    found = _whole(body, name, None, 0)
    if found is not None and found > TOP:
        raise InputError(f"{name} is {found}, expected at most {TOP} of the likeliest tokens")
    if not chat:
        return found
    if not _flag(body, "logprobs"):
        if found:
            raise InputError(f"top_logprobs is {found} without logprobs: add logprobs=true")
        return None
    return found or 0


def _flag(body: dict[str, Any], name: str) -> bool:
    found = body.get(name)
    if found not in (None, True, False) or isinstance(found, int | float) and not isinstance(found, bool):
        raise InputError(f"{name} is {found!r:.80}, expected true or false")
    return bool(found)


def _whole(
    body: dict[str, Any], name: str, default: int | None, least: int, most: int = 2**31 - 1
) -> int | None:
    found = body.get(name, default)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise InputError(f"{name} is {found!r:.80}, expected a whole number from {least} to {most}")
    return found


def _number(body: dict[str, Any], name: str, default: float | None, least: float, most: float) -> Any:
    found = body.get(name, default)
    if found is None:
        return default
    good = isinstance(found, int | float) and not isinstance(found, bool) and least <= found <= most
    if not good:
        raise InputError(f"{name} is {found!r:.80}, expected a number from {least:g} to {most:g}")
    # top_p = 1 and min_p = 0 let every token pass, so they are no filter.
    return None if default is None and found == (1.0 if name == "top_p" else 0.0) else float(found)
