"""The engine's interface: requests to it, their results, and the state of a running request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.prefill import check_reach
from kvjax.api.sampling import Sampler
from kvjax.base.checks import check_in_vocabulary, finite_number, id_array, prng_key, stop_ids, whole_number
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Method
from kvjax.methods import as_method
from kvjax.models.model import Model, check_single
from kvjax.serve.requests import RequestProgress

# The most tokens that may be named beside one that was written.
TOP = 20


class GeneratedToken(NamedTuple):
    """A token, its log-probability, and (id, log-probability) of the likeliest tokens in its place."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = []


@dataclass(frozen=True, eq=False)
class Prompt:
    """One request: a prompt, and how its continuation is generated.

    Args:
        tokens: token ids of the prompt.
        max_new_tokens: the most tokens to generate.
        method: a method, its text, or None for the full cache; requests of one run may differ in it.
        sampler: how tokens are drawn; None takes the likeliest.
        key: a PRNG key, by which `kvjax.generate` would draw the same tokens.
        stop: token ids that end the text; None takes the checkpoint's.
        arrived: its arrival time, in seconds after the start.
        top: how many of the likeliest tokens are returned beside each generated token, at most 20.

    >>> Prompt([1, 2, 3], max_new_tokens=4).max_new_tokens
    4
    """

    tokens: Sequence[int] | Int[np.ndarray, "T"]
    max_new_tokens: int = 64
    method: Method | str | None = None
    sampler: Sampler | None = None
    key: Array | None = None
    stop: Sequence[int] | None = None
    arrived: float = 0.0
    top: int = 0


class Answer(NamedTuple):
    """The result of a request.

    tokens, logprobs: of the generated tokens, a stop token included. state: "ended", "refused" (it needs more
    pages than the pool has), "failed" (`error` says why) or "gone" (its client disconnected). reason: why the
    text ended, "stop" or "length"; empty if it did not. matched: how many tokens of its prompt were found in
    the prefix tree. tops: for every generated token, (id, log-probability) of the likeliest ones, as many as
    were asked for.
    """

    tokens: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "n"]
    state: str
    reason: str = ""
    error: str = ""
    matched: int = 0
    preempted: int = 0
    tops: tuple[list[tuple[int, float]], ...] = ()


@dataclass(eq=False)
class Job:
    """A running request: its generated tokens, and where its slots are (`place`).

    next: the position of the next token to be stored. told: called after every token, in the engine's thread.
    """

    id: int
    model: Model
    method: Method
    tokens: np.ndarray
    most: int
    sampler: Sampler
    key: np.ndarray
    stop: tuple[int, ...]
    top: int = 0
    place: Any = None
    entry: RequestProgress | None = None
    next: int = 0
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    error: str = ""
    told: Callable[[Job], None] | None = None

    @property
    def over(self) -> bool:
        """Whether its text has ended."""
        return bool(self.reason)

    @property
    def reason(self) -> str:
        """Why its text has ended; empty if it continues."""
        if self.written and self.written[-1] in self.stop:
            return "stop"
        return "length" if len(self.written) >= self.most else ""

    def add(self, token: GeneratedToken) -> None:
        """Append a token; set `error` if its log-probability is NaN."""
        if np.isnan(token.logprob):
            self.error = (
                f"the logits of token {len(self.written)} are not numbers: the model or its method overflows "
                "there"
            )
            return
        self.written.append(token.id)
        self.logprobs.append(token.logprob)
        self.tops.append(token.top[: self.top])
        if self.told is not None:
            self.told(self)

    def answer(self) -> Answer:
        """Return the `Answer` so far."""
        entry = self.entry
        state = "failed" if self.error else "gone" if entry is None else entry.state
        matched, preempted = (0, 0) if entry is None else (entry.matched, entry.preempted)
        reason = self.reason if state == "ended" else ""
        ids, heard = np.array(self.written, np.int32), np.array(self.logprobs, np.float32)
        return Answer(ids, heard, state, reason, self.error, matched, preempted, tuple(self.tops))


def job_of(model: Model, id: int, given: Prompt, default: Method | str | None = None) -> Job:
    """Check a request and make a job of it.

    Raises InputError for what `kvjax.generate` refuses.
    """
    check_single(model, "answer its requests with kvjax.generate")
    method = ready(model, as_method(given.method if given.method is not None else default) or Method())
    if any(one.read_prompt is not None for one in method.sentences):
        raise InputError(
            f"{method.id} picks blocks among all tokens of a prompt, and a server reads prompts in pieces: "
            "generate with kvjax.generate, or serve another method"
        )
    ids = id_array("tokens", given.tokens)
    if ids.ndim != 1 or not ids.size:
        raise InputError(f"tokens is {list(ids.shape)}, expected the ids of one prompt, at least one")
    check_in_vocabulary(ids, model.config.vocab)
    most = whole_number("max_new_tokens", given.max_new_tokens, 1, "tokens")
    finite_number("arrived", given.arrived, 0.0)
    if whole_number("top", given.top, 0, "tokens") > TOP:
        raise InputError(f"top is {given.top}, expected at most {TOP} of the likeliest tokens")
    check_reach(model, len(ids) + most, method)
    read = len(ids) if method.reread is None else method.reread.most(len(ids))
    check_budget(method, {read})
    stop = tuple(stop_ids(model.stop_ids if given.stop is None else given.stop))
    sampler = given.sampler or Sampler()
    if not isinstance(sampler, Sampler):
        raise InputError(f"sampler is {sampler!r}, expected a kvjax.Sampler, such as kvjax.Sampler(1.0)")
    key = jax.random.key(0) if given.key is None else prng_key(given.key)
    data = np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))
    return Job(id, model, method, ids.astype(np.int32), most, sampler, data, stop, given.top)
