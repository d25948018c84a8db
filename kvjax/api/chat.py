"""Conversations: `chat`, whose turns read only new tokens and share compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.api.chat_text import CachedText, NextTurn, ahead, check_chat, first_messages
from kvjax.api.decode_loop import writing
from kvjax.api.logit_processors import Processor, history
from kvjax.api.nan_checks import refuse_step
from kvjax.api.prefill import bare_cache, labelled, method_of, padded, read_prompt
from kvjax.api.prepare import made
from kvjax.api.sampling import Sampler
from kvjax.api.step import positions_left, stepping
from kvjax.api.stop_strings import StopStrings
from kvjax.api.streamed_text import Decoding
from kvjax.api.turns import capacity_of_turn, doubled, padded_to
from kvjax.api.types import has_verbs, refuse
from kvjax.base.checks import callables, check_text, prng_key, whole_number
from kvjax.base.errors import InputError
from kvjax.compat.max_length import last_position
from kvjax.grammar import Method
from kvjax.hosts.arrays import fetch
from kvjax.models.model import Model
from kvjax.state.cache import Cache


class Turn(NamedTuple):
    """How many tokens a turn read and generated, the token that ends an answer included.

    again: whether it read the whole conversation, because the chat template changed what the cache holds.
    """

    read: int
    written: int
    again: bool


class Chat:
    """A conversation with a model: messages, and the cache that holds them, compressed by a method.

    messages: dicts with "role" and "content". cache: a `kvjax` cache like any other, None before the first
    question; no turn consumes it, so it may be kept. turns: what each turn read and generated. capacity: how
    many tokens the cache is made for, which is the number of slots of a full cache.
    """

    def __init__(
        self, model: Model, method: Method, *, system: str | None, max_new_tokens: int, sampler: Sampler,
        processors: tuple[Processor, ...], stop_strings: Sequence[str], key: Array,
    ):  # fmt: skip
        self.model, self.method, self.system, self.max_new_tokens = model, method, system, max_new_tokens
        self.sampler, self.processors, self.stop_strings, self.key = sampler, processors, stop_strings, key
        self.reset()

    def reset(self) -> None:
        """Forget all questions and answers; the system's message stays."""
        self.messages: list[dict[str, str]] = first_messages(self.system)
        self.cache: Cache | None = None
        self.turns: list[Turn] = []
        self.capacity = 0
        self._said: CachedText | None = None
        self._past: list[int] = []

    def state(self) -> dict[str, Any]:
        """Return the state of the conversation beside its cache, as JSON data."""
        said = None if self._said is None else self._said._asdict()
        return dict(
            system=self.system, messages=self.messages, turns=self.turns, capacity=self.capacity, said=said,
            past=self._past,
        )  # fmt: skip

    def resume(self, state: Mapping[str, Any], cache: Cache) -> None:
        """Continue from the result of `state` and the cache of that time.

        Raises KeyError, TypeError, AttributeError or ValueError if it is not such a result.
        """
        said = CachedText(**{**state["said"], "ids": tuple(map(int, state["said"]["ids"]))})
        self.messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in state["messages"]]
        self.turns = [Turn(*turn) for turn in state["turns"]]
        self.capacity, self._said, self._past = int(state["capacity"]), said, list(map(int, state["past"]))
        self.cache = cache

    def copy(self) -> Chat:
        """Return another conversation with the same past, which continues separately. Copies no array."""
        new = object.__new__(Chat)
        vars(new).update(vars(self))
        new.messages, new.turns, new._past = [*self.messages], [*self.turns], [*self._past]
        return new

    def say(self, text: str) -> str:
        """Answer `text`. Raises InputError as `stream`."""
        for _ in self.stream(text):
            pass
        return self.messages[-1]["content"]

    def stream(self, text: str) -> Iterator[str]:
        """Yield the answer to `text`, piece by piece in whole characters, as the model writes it.

        If the caller stops iterating, the answer ends there, and the conversation continues with the part
        that was generated. After an error the conversation is as before.

        Raises InputError if `text` is not a string, the template refuses it, or it and one more token reach
        beyond the model's last position.
        """
        check_text(text, "the question")
        messages = [*self.messages, {"role": "user", "content": text}]
        return self._answer(messages, ahead(self.model, messages, self._said))

    def _answer(self, messages: list[dict[str, str]], new: NextTurn) -> Iterator[str]:
        model = self.model
        room = min(self.max_new_tokens, last_position(self.method, model.config))
        logits, cache = read_prompt(
            model, [new.ids], method=self.method if new.again or self.cache is None else None,
            cache=None if new.again else self.cache, room=room, turn=True,
        )  # fmt: skip
        past = [*([] if new.again else self._past), *new.ids]
        seen = 0 if new.again or self.cache is None else int(fetch(self.cache.next)[0])
        held = capacity_of_turn(self.method, seen, len(new.ids), room, model.config)
        one, params = stepping(model, self.method, None)
        parts = writing(
            one, params, logits, bare_cache(cache),
            new=min(self.max_new_tokens, positions_left(model, cache)), sampler=self.sampler,
            key=jax.random.fold_in(self.key, len(self.turns)),
            stop=jnp.asarray(model.stop_ids or [-1], jnp.int32), processors=self.processors, one_by_one=True,
            refuse_nan=lambda at: refuse_step(at, self.method.id), past=self._history(past, held),
            ends=StopStrings(model, self.stop_strings, 1) if self.stop_strings else None,
        )  # fmt: skip
        ids, shown, state = [], Decoding(model.tokenizer), None
        try:
            for part in parts:
                ids, state = [*ids, int(part.tokens[0, 0])], part.cache
                if piece := "" if ids[-1] in model.stop_ids else shown.add(ids[-1]):
                    yield piece
            if piece := shown.rest():
                yield piece
        except GeneratorExit:
            pass
        finally:
            parts.close()
        assert state is not None
        after = dataclasses.replace(labelled(state, self.method, model), added=cache.added)
        self.capacity = held
        self._note(messages, new, after, past, ids)

    def _history(self, past: list[int], held: int) -> Array | None:
        """Put the tokens so far, for processors, into an array of the cache's capacity, or twice as long."""
        if not self.processors:
            return None
        batch = padded(self.model, [past], None)
        tokens = padded_to(batch.tokens, doubled(len(past), held))
        return history(jnp.asarray(tokens), jnp.asarray(batch.lengths), self.max_new_tokens)

    def _note(
        self, messages: list[dict[str, str]], new: NextTurn, cache: Cache, past: list[int], ids: list[int]
    ) -> None:
        """Record the results of a turn."""
        stop = ids[-1] if ids[-1] in self.model.stop_ids else None
        text = ids if stop is None else ids[:-1]
        said = self.model.tokenizer.decode(text, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        self.cache, self._past = cache, [*past, *ids]
        self.turns = [*self.turns, Turn(len(new.ids), len(ids), new.again)]
        self._said = CachedText(new.text, tuple(text), said, stop)


def chat(
    model: Model,
    method: Method | str | None = None,
    *,
    system: str | None = None,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    processors: Sequence[Processor] = (),
    stop_strings: Sequence[str] = (),
    key: Array | None = None,
) -> Chat:
    """Begin a conversation with a model under a method.

    Each turn reads the tokens that the model's chat template adds to those of the cache. If the template
    rewrites earlier turns, such as templates that drop a model's thoughts, the whole conversation is read
    again, and `Turn.again` is set. Methods select among all slots at the end of every question, those of
    earlier answers included, and methods that act in steps also while an answer is generated. Capacities
    double, so turns share programs; `kvjax.nbytes(chat.cache)` counts slots that are still empty, too.

    Args:
        model: a model with a tokenizer and a chat template.
        method: a method, its text, or None for the full cache.
        system: the system's message.
        max_new_tokens: the most tokens of an answer.
        sampler: as in `kvjax.generate`.
        processors: as in `kvjax.generate`.
        stop_strings: texts that end an answer, as the model's stop ids do.
        key: as in `kvjax.generate`.

    Returns:
        A `Chat`, whose `say` gives an answer and `stream` its pieces as they come.

    Raises:
        InputError: if the model has no chat template or no tokenizer, its template refuses a system message,
            or the method does not fit the model.

    >>> import kvjax  # doctest: +SKIP
    >>> talk = kvjax.chat(kvjax.load("smollm2-135m"), "snapkv(budget=0.5)")  # doctest: +SKIP
    >>> talk.say("Name a prime."), talk.say("Another?")  # doctest: +SKIP
    """
    reads_alone: bool = has_verbs(model)
    refuse(model, {"a conversation": reads_alone})
    check_chat(model, first_messages(system))
    whole_number("max_new_tokens", max_new_tokens, 1, "tokens")
    if sampler is not None and not callable(sampler):
        raise InputError(f"sampler is {sampler!r}, expected a kvjax.Sampler, such as kvjax.Sampler(1.0)")
    chosen = method_of(model, method, None)
    return Chat(
        made(model, chosen), chosen, system=system, max_new_tokens=max_new_tokens,
        sampler=sampler or Sampler(), processors=callables("processors", processors),
        stop_strings=stop_strings, key=jax.random.key(0) if key is None else prng_key(key),
    )  # fmt: skip
