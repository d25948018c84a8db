"""Questions about contexts of the recall language: training sequences, evaluation samples, their score.

Every sample is a pure function of (task, seed, index, tokens), so a cell of a comparison can be computed
anywhere, in any order, and resumed. A sample has the positions of the needed records in the context
(`spans`): the share of them that is kept is a diagnostic of every method that evicts. No model is run here.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

import numpy as np
from jaxtyping import Float32, Int, Int8, Int32

from kvjax.base.errors import InputError
from kvjax.eval.tasks.recall import (
    ALL,
    CHASE,
    COMMA,
    COPY,
    DOT,
    EVAL_DENSITY,
    GET,
    MODE,
    Context,
    make_context,
    min_tokens,
)
from kvjax.eval.tasks.sample import ForcedSample

CUE_TOKENS = 4
COPY_TOKENS = (8, 24)


class Task(NamedTuple):
    """What a task measures, its weight in the training mix, and whether methods may be ranked on it."""

    about: str
    weight: float
    ranked: bool = True


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "get": Task("the value of a key: single-hop retrieval", 0.42),
        "chase": Task("follow pointers from key to key, writing the chain out: multi-hop retrieval", 0.18),
        "all": Task("both values of a key that was set and added to: multi-value retrieval", 0.12),
        "copy": Task("continue a span of the context, scored per token: incompressible content", 0.15),
        "multikey": Task("like get, among keys that share a word with the asked one", 0.10),
        "mode": Task("the most frequent tag: aggregation over the whole context", 0.25, ranked=False),
    }
)
"""Tasks by name, in the order of the `kinds` of a training batch (1 + index; 0 outside answers)."""

MIX: Mapping[str, float] = MappingProxyType({name: task.weight for name, task in TASKS.items()})

# The share of records that resemble the key in question, and of training contexts that have such a key.
_FAMILY_TRAINING, _FAMILY_CONTEXTS = (0.3, 1.0), 0.2
# The same in evaluation: for contexts of `multikey` alone, and for contexts in which other tasks need
# records.
_FAMILY_ALONE, _FAMILY_SHARED = 1.0, 0.5


class Question(NamedTuple):
    """A question about a context: ids to append, ids of the answer, spans of the context it needs."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def subjects(context: Context, task: str) -> list[tuple[int, ...]]:
    """Keys that a task can ask about; `[()]` for tasks that name no key, `[]` if nothing can be asked.

    The key with look-alikes is asked about by `multikey` only.
    """
    kinds = {"get": "value", "chase": "pointer", "all": "second"}
    if task in kinds:
        return [r.key for r in context.records if r.kind == kinds[task] and r.key != context.target]
    if task == "multikey":
        return [context.target] if context.target else []
    return [()]


def _repeated_cues(context: Context) -> np.ndarray:
    """1 at positions whose next four tokens also occur elsewhere in the context."""
    ids = np.asarray(context.tokens, np.int64)
    cues = (ids[:-3] << 24) | (ids[1:-2] << 16) | (ids[2:-1] << 8) | ids[3:]
    _, where, counts = np.unique(cues, return_inverse=True, return_counts=True)
    return (counts[where] > 1).astype(np.int64)


def _ask_copy(rng: np.random.Generator, context: Context, *, clear: bool) -> Question:
    """Repeat a span after its first four tokens, which occur once in the context if possible.

    clear: only spans with the fewest positions at which four tokens do not determine the next one.
    """
    length = min(int(rng.integers(*COPY_TOKENS)), len(context.tokens) - CUE_TOKENS - 1)
    repeated = _repeated_cues(context)
    last = len(context.tokens) - CUE_TOKENS - length
    if clear:
        doubts = np.convolve(repeated, np.ones(length, np.int64), "valid")[1 : last + 1]
    else:
        doubts = repeated[1 : last + 1]
    start = 1 + int(rng.choice(np.flatnonzero(doubts == doubts.min())))
    cut, end = start + CUE_TOKENS, start + CUE_TOKENS + length
    return Question((COPY, *context.tokens[start:cut]), context.tokens[cut:end], ((start, end),))


def ask(
    rng: np.random.Generator, context: Context, task: str, subject: tuple[int, ...], *, clear: bool = False
) -> Question:
    """Ask the question of a task about one of its `subjects`, with the answer that the context gives.

    clear: `copy` asks only for spans in which any four tokens determine the next one (for evaluation).

    >>> from kvjax.eval.tasks.recall import make_context
    >>> context = make_context(np.random.default_rng(0), 128, density=0.35)
    >>> question = ask(np.random.default_rng(1), context, "get", subjects(context, "get")[0])
    >>> len(question.prompt), len(question.answer)
    (3, 4)
    """
    if task == "copy":
        return _ask_copy(rng, context, clear=clear)
    if task == "mode":
        votes = [r for r in context.records if r.kind == "tag"]
        winner = int(np.bincount([r.content[0] for r in votes]).argmax())
        return Question((MODE,), (winner, DOT), tuple(r.span for r in votes))
    first = {r.key: r for r in context.records if r.kind in ("value", "pointer")}
    if task == "all":
        second = next(r for r in context.records if r.kind == "second" and r.key == subject)
        answer = (*first[subject].content, COMMA, *second.content, DOT)
        return Question((ALL, *subject), answer, (first[subject].span, second.span))
    hops = [first[subject]]
    while hops[-1].kind == "pointer":
        hops.append(first[hops[-1].content])
    answer = (*(token for hop in hops for token in hop.content), DOT)
    return Question((CHASE if task == "chase" else GET, *subject), answer, tuple(hop.span for hop in hops))


def _questions(
    rng: np.random.Generator, context: Context, mix: Mapping[str, float]
) -> Iterator[tuple[str, Question]]:
    """Endless questions in random order; none is repeated before all have occurred.

    Otherwise models would answer the second `<mode>` of a sequence by repeating the first answer, and never
    learn to count.
    """
    left: dict[str, list[tuple[int, ...]]] = {}
    while True:
        if not left:
            every = {task: subjects(context, task) for task, weight in mix.items() if weight > 0}
            left = {task: options for task, options in every.items() if options}
        weights = np.array([mix[task] for task in left])
        task = list(left)[int(rng.choice(len(left), p=weights / weights.sum()))]
        subject = left[task].pop(int(rng.integers(len(left[task])))) if task != "copy" else ()
        if not left[task]:
            del left[task]
        yield task, ask(rng, context, task, subject)


def training_batch(
    rng: np.random.Generator, batch: int, length: int, mix: Mapping[str, float] = MIX
) -> tuple[Int32[np.ndarray, "B T"], Float32[np.ndarray, "B T"], Int8[np.ndarray, "B T"]]:
    """Sequences of T = `length` + 1 ids: a context of 50-75 % of them, then questions and answers until full.

    Returns tokens, loss weights (1 on answers, 0.1 on the context, 0 on the prompts of questions) and kinds
    (1 + index into `TASKS` on answers, 0 elsewhere), each aligned with the token it speaks of. Many questions
    per sequence, as in MQAR (Arora et al., 2023, arXiv:2312.04927).

    Raises InputError for unknown tasks in `mix` and for a length that is too short (naming the minimum).

    >>> tokens, weights, kinds = training_batch(np.random.default_rng(0), 2, 128)
    >>> tokens.shape
    (2, 129)
    """
    check_tasks(tuple(mix))
    shortest = 2 * min_tokens(family=True)
    if length < shortest:
        raise InputError(f"recall training sequences need {shortest} tokens or more, got length={length}")
    tokens = np.zeros((batch, length + 1), np.int32)
    weights = np.zeros((batch, length + 1), np.float32)
    kinds = np.zeros((batch, length + 1), np.int8)
    for row in range(batch):
        family = float(rng.uniform(*_FAMILY_TRAINING)) if rng.random() < _FAMILY_CONTEXTS else 0.0
        context = make_context(rng, int((length + 1) * rng.uniform(0.5, 0.75)), family=family)
        at = len(context.tokens)
        tokens[row, :at], weights[row, :at] = context.tokens, 0.1
        for task, question in _questions(rng, context, mix):
            if at > length:
                break
            ids = (*question.prompt, *question.answer)[: length + 1 - at]
            tokens[row, at : at + len(ids)] = ids
            answer = slice(at + len(question.prompt), at + len(ids))
            weights[row, answer], kinds[row, answer] = 1.0, 1 + list(TASKS).index(task)
            at += len(ids)
    return tokens, weights, kinds


def check_tasks(tasks: Sequence[str]) -> None:
    known = ", ".join(TASKS)
    if not tasks:
        raise InputError(f"no recall task was given: name at least one of {known}")
    for task in tasks:
        if task not in TASKS:
            near = get_close_matches(task, TASKS, n=1, cutoff=0.0)[0]
            raise InputError(f"unknown recall task {task!r}: did you mean {near!r}? The tasks are {known}")


def _group_id(tasks: Sequence[str]) -> int:
    return crc32("+".join(sorted(tasks)).encode())


def _shared_context(tasks: Sequence[str], seed: int, index: int, tokens: int) -> Context:
    """Make a context in which every task can be asked as often as `tasks` lists it, whatever their order."""
    family = 0.0
    if "multikey" in tasks:
        family = _FAMILY_ALONE if set(tasks) == {"multikey"} else _FAMILY_SHARED
    values, pointers, seconds = (tasks.count(task) for task in ("get", "chase", "all"))
    least = min_tokens(values=values, pointers=pointers, seconds=seconds, family=family > 0)
    if tokens < least:
        raise InputError(
            f"{len(tasks)} question(s) ({', '.join(tasks)}) need a recall context of {least} tokens or more, "
            f"got {tokens}: ask for a longer context or for fewer questions"
        )
    return make_context(
        np.random.default_rng([seed, _group_id(tasks), index]),
        tokens,
        density=EVAL_DENSITY,
        family=family,
        values=values,
        pointers=pointers,
        seconds=seconds,
    )


def context_samples(tasks: Sequence[str], *, seed: int, index: int, tokens: int) -> list[ForcedSample]:
    """One question per entry of `tasks` about one context of exactly `tokens` ids: one prefill serves all.

    A task that occurs several times asks about different records (`mode` and `multikey` have one subject).
    The context depends on which tasks are given, not on their order. Raises InputError for unknown tasks, and
    for a context too short for the questions (naming the minimum).

    >>> get, copy = context_samples(["get", "copy"], seed=0, index=0, tokens=128)
    >>> get.context == copy.context, len(get.context)
    (True, 128)
    """
    tasks = tuple(tasks)
    check_tasks(tasks)
    context = _shared_context(tasks, seed, index, tokens)
    samples = []
    for i, task in enumerate(tasks):
        turn = tasks[:i].count(task)
        options = subjects(context, task)
        order = np.random.default_rng([seed, crc32(task.encode()), index, 1]).permutation(len(options))
        rng = np.random.default_rng([seed, crc32(task.encode()), index, 2, turn])
        question = ask(rng, context, task, options[order[turn % len(options)]], clear=True)
        name = f"{task}-{tokens}-s{seed}-i{index}-q{turn}-{_group_id(tasks):08x}"
        samples.append(
            ForcedSample(name, task, context.tokens, question.prompt, question.answer, question.spans)
        )
    return samples


def sample(task: str, *, seed: int, index: int, tokens: int) -> ForcedSample:
    """Sample `index` of a task over a context of exactly `tokens` ids; a pure function of its arguments.

    Raises InputError for an unknown task (naming the nearest) and a context that is too short.

    >>> one = sample("get", seed=0, index=3, tokens=128)
    >>> len(one.context), len(one.question), len(one.answer), len(one.spans)
    (128, 3, 4, 1)
    """
    return context_samples([task], seed=seed, index=index, tokens=tokens)[0]


def conversation(
    tasks: Sequence[str], *, seed: int, index: int, tokens: int, turns: int = 5
) -> list[ForcedSample]:
    """Ask `turns` questions in order about one context, going round `tasks`: SCBench's multi-turn protocol.

    Question t follows the answers to all before it; whether those are the right ones or the model's own, the
    runner decides. Source: Li et al., 2024, arXiv:2412.10319, whose conversations have five turns too.

    >>> [turn.task for turn in conversation(["get", "chase"], seed=0, index=0, tokens=256, turns=3)]
    ['get', 'chase', 'get']
    """
    check_tasks(tuple(tasks))
    if turns < 1:
        raise InputError(f"a conversation has 1 turn or more, got {turns}")
    around = [tasks[turn % len(tasks)] for turn in range(turns)]
    return context_samples(around, seed=seed, index=index, tokens=tokens)


def score(
    task: str, prediction_ids: Sequence[int] | Int[np.ndarray, " T"], answer_ids: Sequence[int]
) -> float:
    """Exact match, 0 or 1; for `copy` the share of the answer's tokens predicted at their place.

    Tokens predicted beyond the answer's length do not count: every answer but that of `copy` ends with `<.>`.

    >>> score("get", [81, 82, 83, 5], [81, 82, 83, 5]), score("copy", [160, 161, 9], [160, 161, 162, 163])
    (1.0, 0.5)
    """
    check_tasks([task])
    hits = [bool(predicted == wanted) for predicted, wanted in zip(prediction_ids, answer_ids, strict=False)]
    if task == "copy":
        return sum(hits) / len(answer_ids)
    return float(len(hits) == len(answer_ids) and all(hits))
