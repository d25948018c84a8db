"""Words of a keep against float64 slots: refused keeps answer otherwise, all others answer so."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget
from kvjax.grammar.chains import check
from kvjax.grammar.kinds import Trace
from kvjax.grammar.phase import BY_POSITION, ByRank, Clamped
from kvjax.grammar.when import STEP, Every
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, PerLayer, Threshold, UpTo
from kvjax.keep.merges.merge_values import ValueBlend
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.question import ChunkAttention
from kvjax.keep.scores.score import AccumulatedAttention, DecayedAttention, Novelty, Position, WindowAttention
from tests.float64 import dynamic, merges
from tests.float64.frequency import FreqKV
from tests.float64.reference import Row, best, window_score
from tests.methods.battery import MAIN, B, model, off, positions, prompt_of
from tests.methods.expected import LADDER, PASSED, PREFIX, adakv_counts
from tests.methods.marked import RESTORED, Read, after
from tests.methods.method_pairs import answers, apart, unchecked
from tests.methods.rows import KERNEL, SNAP, THETA, WINDOW, count
from tests.methods.table import BY_LABEL
from tests.methods.test_conditions import ALL, H2O, SAME, UNIFORM, changed, keep, needed, row
from tests.sweep import sweep

LEAST = 0.4


def slots_of(label, **replaced):
    """Give a row of the table other expectations."""
    return dataclasses.replace(BY_LABEL[label], **replaced)


def by_rank(leave):
    """Make a merge that compares keys as their ranks rotate them, and rotates the merged ones back."""

    def ranked(memory, lists, gone):
        each = [[slot["pos"] for slot in slots] for slots in lists]
        for slots, pos in zip(lists, each, strict=True):
            for slot, rank in zip(slots, np.argsort(np.argsort(pos)), strict=True):
                slot["pos"] = int(rank)
        leave(memory, lists, gone)
        for slots, pos in zip(lists, each, strict=True):
            for slot, own in zip(slots, pos, strict=True):
                slot["pos"] = own

    return ranked


def blend(turns):
    """kvpress' rule (`ValueBlend`): an evicted value goes to the nearest of the keys, rotated by `turns`."""

    def leave(memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            stay, old = merges.stays_and_leaves(slots, some)
            if not old:
                continue
            phases = dict(zip((s["pos"] for s in slots), turns([s["pos"] for s in slots]), strict=True))
            of = lambda part, by=phases: merges.rope(  # noqa: E731
                np.stack([s["k"] for s in part]), [by[s["pos"]] for s in part], THETA
            )
            unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
            cosine = unit(of(old)) @ unit(of(stay)).T
            values = [s["v"] for s in stay]
            shares = [[1.0] for _ in stay]
            parts = [[v] for v in values]
            for slot, near, like in zip(old, cosine.argmax(-1), cosine.max(-1), strict=True):
                mine, theirs = np.linalg.norm(slot["v"]), np.linalg.norm(values[near])
                shares[near].append(max(like, 0.0) * mine / (mine + theirs + 1e-6))
                parts[near].append(slot["v"])
            for slot, weights, each in zip(stay, shares, parts, strict=True):
                slot["v"] = np.asarray(weights) @ np.stack(each) / np.sum(weights)

    return leave


def above(least, share=0.0):
    """Keep what has received as much attention as `least`, and the newest share of all tokens."""

    def kept(prompt):
        newest = np.arange(prompt.length) >= prompt.length - int(prompt.length * share)
        out = []
        for k, p in zip(prompt.k, prompt.p, strict=True):
            mass = p.reshape(len(k), -1, prompt.length, prompt.length).sum((1, 2))
            out.append((mass >= least) | newest | (mass == mass.max(-1, keepdims=True)))
        return out

    return kept


def below(least, share=0.0, every=1, key=lambda slot: slot["mass"]):
    def victims(lists, length, queries):
        due = (length - len(MAIN.first[0])) % every == 0
        start = length - int(length * share)
        return [
            np.array([i for i, s in enumerate(slots) if key(s) < least and s["pos"] < start], int)
            if due
            else None
            for slots in lists
        ]

    return victims


def faded(rate):
    """Sum a slot's attention, older queries counting less."""

    def total(slot):
        given = np.asarray(slot["given"])
        return (given * rate ** np.arange(len(given))[::-1]).sum()

    return total


def faded_above(rate, least):
    def kept(prompt):
        weights = rate ** np.arange(prompt.length)[::-1]
        out = []
        for k, p in zip(prompt.k, prompt.p, strict=True):
            mass = weights @ p.reshape(len(k), -1, prompt.length, prompt.length).sum(1)
            out.append((mass >= least) | (mass == mass.max(-1, keepdims=True)))
        return out

    return kept


def by_attention(allocate, **more):
    return keep(AccumulatedAttention(), 1.0, allocate=allocate, **({"when": STEP} | more))


def of_attention(leave=None, share=0.0, least=LEAST, every=1):
    return slots_of("h2o", kept=above(least, share), victim=below(least, share, every), leave=leave)


class EveryToken(dynamic.LaCache):
    def victims(self, lists, length, queries):
        return [self.leaving(s, length) if len(s) > self.count(length) else None for s in lists]


own = lambda pos: pos  # noqa: E731
ranks = lambda pos: np.argsort(np.argsort(pos))  # noqa: E731
FREQUENT = FreqKV(count, every=1, sinks=1, newest=2)
RUNGS = EveryToken(count, **LADDER.hyper)
FAR = BY_LABEL["lm-infinite"].phase
AT_ENDS = changed(row("ape"), score=Position(), budget=Budget(0.5), protect=(Sink(4),))


def ends(prompt):
    """Keep the first four tokens, and as many of the newest ones as the budget has left."""
    pos = np.arange(prompt.length)
    stays = (pos < 4) | (pos >= prompt.length - (count(prompt.length) - 4))
    return [np.tile(stays, (len(k), 1)) for k in prompt.k]


RESTORE = changed(row("restorekv"), score=Position(), probe=None, allocate=UNIFORM, protect=(Sink(4),))
FEWER = kvjax.method("fastkv", budget=0.5, **SNAP, tsp_layer=0, share=PASSED).keep.narrow


def goes_on(prompt, layer):
    """FastKV's choice of the tokens that go on after the first layer."""
    if layer > 0:
        return None
    score = window_score(prompt, layer, WINDOW, KERNEL, kind="mean", per_query_head=True).sum(0)
    return np.flatnonzero(best(score, max(WINDOW, int(prompt.length * PASSED))))


def beside_restored(found):
    """Return the first four tokens, the newest ones that restore tokens leave room for, and these."""
    out, n, t = [], count(found.prompt.length), found.prompt.length
    for k, at in zip(found.k, found.at, strict=True):
        prompts = at[at < t]
        first, others = prompts[prompts < 4], prompts[prompts >= 4]
        newest = others[len(others) - max(n - len(first) - RESTORED.tokens, 0) :]
        stays = np.isin(np.arange(found.length), [*first, *newest]) | (np.arange(found.length) >= t)
        out.append(np.tile(stays, (len(k), 1)))
    return out


def most_attended(found):
    """Return the first four tokens, those that the prompt's queries attended to most, and restore tokens."""
    out, t = [], found.prompt.length
    for k, p in zip(found.k, found.prompt.p, strict=True):
        mass = np.where(np.arange(t) < 4, np.inf, p.reshape(len(k), -1, t, t).sum((1, 2)))
        stays = best(mass, count(t) - RESTORED.tokens)
        out.append(np.concatenate([stays, np.ones((len(k), RESTORED.tokens), bool)], 1))
    return out


def all_slots(found):
    return [np.ones((len(k), found.length), bool) for k in found.k]


def restoring(kept=beside_restored, narrow=None, **more):
    """Float64 slots of a prompt, read in part by the upper layers, and of restore tokens."""
    reads = slots_of("fastkv", narrow=narrow).read
    return slots_of("restorekv", kept=kept, reread=lambda prompt: RESTORED(reads(prompt)), **more)


def asked_again(prompt):
    """KVzip's best of what the upper layers read, which is all that the repeated prompt attends to there."""
    ids = [*PREFIX, *prompt.tokens]
    x, at = prompt.decoder.rest["embed"][np.asarray(ids)], prompt.length + np.arange(len(ids))
    sees, plain = after(prompt, len(ids)), np.zeros(len(ids))
    again = Read(prompt.decoder, x, at, sees, plain, RESTORED.fitted, (prompt.k, prompt.v))
    found = []
    for k, p, own in zip(prompt.k, again.p, prompt.at, strict=True):
        score = np.full((len(k), prompt.length), -np.inf)
        score[:, own] = p[:, :, : len(own)].reshape(len(k), -1, len(ids), len(own)).max((1, 2))
        score[:, own[own < 4]] = np.inf
        found.append(best(score, min(count(prompt.length), len(own))))
    return found


def narrowed_scores(prompt):
    """SnapKV's scores of every layer's tokens, -inf for those that its layer does not read."""
    found = []
    for i, at in enumerate(prompt.at):
        score = window_score(prompt, i, WINDOW, KERNEL, kind="mean")
        found.append(np.full((len(score), prompt.length), -np.inf))
        found[-1][:, at] = score
    return np.stack(found)


def in_heads(prompt):
    found = []
    for score in narrowed_scores(prompt):
        live = (score > -np.inf).sum(-1)
        found.append(best(score, np.minimum(adakv_counts(score, count(prompt.length), 0.2), live)))
    return found


def in_layers(prompt):
    scores = narrowed_scores(prompt)
    most = scores.shape[0] * scores.shape[1] * count(prompt.length)
    return list(best(scores.reshape(1, -1), [most]).reshape(scores.shape) & (scores > -np.inf))


# A keep, and the float64 slots that it answers as.
RIGHT = {
    "values merged under ranks": (
        changed(row("streamingllm"), merge=ValueBlend()), slots_of("streamingllm", leave=blend(ranks)),
    ),
    "keys merged under ranks": (
        changed(row("d2o"), phase=ByRank()),
        slots_of("d2o", phase="rank", leave=by_rank(BY_LABEL["d2o"].leave)),
    ),
    "values merged under clamped distances": (
        changed(row("lm-infinite"), merge=ValueBlend()),
        slots_of("lm-infinite", leave=blend(lambda pos: np.maximum(np.array(pos) - max(pos) + FAR, 0))),
    ),
    "values merged under positions that contexts share": (
        changed(AT_ENDS, merge=ValueBlend()),
        slots_of("ape", kept=ends, leave=blend(lambda pos: BY_LABEL["ape"].phase.phases(np.array(pos)))),
    ),
    "neighbours merged after every token": (
        changed(row("freqkv"), when=STEP),
        slots_of("freqkv", kept=FREQUENT.kept, victim=FREQUENT.victims, leave=FREQUENT.leave),
    ),
    "several slots merged after a token": (
        by_attention(UpTo(LEAST), merge=ValueBlend()), of_attention(blend(own)),
    ),
    "values merged before a token attends": (
        changed(row("dcp"), merge=ValueBlend()), slots_of("dcp", leave=blend(own)),
    ),
    "heads that share a budget of layers with fewer tokens": (
        changed(row("fastkv"), allocate=AcrossHeads()), slots_of("fastkv", kept=in_heads),
    ),
    "layers that share a budget with fewer tokens in some": (
        changed(row("fastkv"), allocate=AcrossLayers()), slots_of("fastkv", kept=in_layers),
    ),
    "a threshold beside a share of the newest": (
        by_attention(UpTo(LEAST), protect=(Recent(0.5),)), of_attention(share=0.5),
    ),
    "restore tokens under ranks": (changed(RESTORE, phase=ByRank()), restoring(phase="rank")),
    "restore tokens beside merges": (changed(RESTORE, merge=ValueBlend()), restoring(leave=blend(own))),
    "restore tokens beside a second tier": (changed(RESTORE, lower=SAME), restoring(all_slots)),
    "restore tokens beside a second tier in pages": (
        changed(row("restorekv"), lower=SAME), restoring(all_slots),
    ),
    "restore tokens beside accumulated attention": (
        changed(RESTORE, score=AccumulatedAttention()), restoring(most_attended),
    ),
    "restore tokens beside fewer tokens": (
        changed(RESTORE, narrow=FEWER), restoring(narrow=goes_on),
    ),
    "a probe beside fewer tokens": (
        changed(row("kvzip"), narrow=FEWER, allocate=UNIFORM),
        slots_of("fastkv", kept=asked_again, narrow=goes_on, model="4/2"),
    ),
}  # fmt: skip
# What the refusal says, a keep that it refuses, and the float64 slots of what it says.
WRONG = {
    "keys merged before rotation that are stored rotated": (
        "merges keys before rotation",
        changed(row("freqkv"), phase=BY_POSITION),
        slots_of("freqkv", phase="position"),
    ),
    "attention under clamped distances": (
        "its score depends on keys or on attention",
        changed(H2O, phase=Clamped(8)),
        slots_of("h2o", phase=8),
    ),
    "several slots merged into slots in pages": (
        "evicts the newest slots alone while decoding",
        by_attention(Threshold(LEAST), merge=ValueBlend()),
        of_attention(blend(own)),
    ),
    "a threshold over slots in pages whose scores fall": (
        "may give a slot a lower score",
        keep(DecayedAttention(0.5), 1.0, allocate=Threshold(0.05), when=STEP),
        slots_of("h2o", kept=faded_above(0.5, 0.05), victim=below(0.05, key=faded(0.5))),
    ),
    "a threshold after several tokens": (
        "or after every token by a threshold",
        by_attention(UpTo(LEAST), when=Every(2)),
        of_attention(every=2),
    ),
    "ranks of tokens that keep their positions": (
        "keeps tokens at their own positions",
        changed(row("fastkv"), phase=ByRank()),
        slots_of("fastkv", phase="rank"),
    ),
    "selections noted of slots in any order": (
        "sees slots in any order",
        changed(row("lacache"), when=STEP),
        slots_of("lacache", victim=RUNGS.victims, leave=RUNGS.leave),
    ),
}


@dataclasses.dataclass(frozen=True)
class ByLayer(Word):
    """The oldest tokens leave the first layer first, and the newest the others."""

    looks = False

    def __call__(self, view, seen):
        return jnp.where(jnp.asarray(seen.layer) == 0, 1.0, -1.0) * view.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Wave(Trace):
    by: float = dataclasses.field(repr=False)

    def start(self, inputs, heads):
        b, t = inputs.pos.shape
        return jnp.broadcast_to(jnp.sin(self.by * inputs.pos[:, None].astype(jnp.float32)), (b, heads, t))

    def grow(self, old, seen):
        return old


@dataclasses.dataclass(frozen=True)
class ShownWave(Wave):
    by: float


@dataclasses.dataclass(frozen=True)
class Waves(Word):
    parts: tuple
    looks = False

    @property
    def traces(self):
        return frozenset(self.parts)

    def __call__(self, view, seen):
        return sum(view.of(part) for part in self.parts)


DCP, FAST = row("dcp"), kvjax.method("fastkv", budget=0.5, window=4, tsp_layer=0, share=1.0)
# As `tests.methods.test_conditions.KEEPS`.
NEEDED = {
    "unequal heads in steps": (
        "evicting while decoding works with the uniform allocation",
        changed(H2O, allocate=AcrossHeads(1.0)),
        (H2O,),
    ),
    "attention of many queries": (
        "has the attention of the newest query alone",
        keep(ChunkAttention(), when=Every(3)),
        ALL,
    ),
    "observations before a token attends": (
        "evicts before a token attends",
        changed(DCP, score=DCP.keep.score + 0.0 * WindowAttention(4)),
        (DCP,),
    ),
    "layers that keep alike in steps": (
        "2 layers keep the tokens that one of them selects",
        keep(ByLayer(), reuse=2, when=STEP),
        (keep(Position(), when=STEP),),
    ),
    "layers that keep alike by budgets of their own": (
        "2 layers keep the tokens that one of them selects",
        keep(ByLayer(), reuse=2, allocate=PerLayer((1.0, 0.5))),
        (keep(Position()),),
    ),
    "surprise in layers with fewer tokens": (
        "its score needs their probabilities",
        changed(FAST, score=Novelty()),
        (changed(FAST, score=Novelty(), narrow=None),),
    ),
    "restore tokens in some layers": (
        "reads whole prompts in all layers",
        changed(row("restorekv"), skip_layers=1),
        ALL,
    ),
}


def talk(method, expected):
    """How far logits are from those of float64 slots at the most, and whether the same slots stay."""
    prompts = [expected.read(prompt_of(expected.model, "main", b)) for b in range(B)]
    rows = [Row(one, expected.kept(one), expected.phase, expected.leave) for one in prompts]
    worst = 0.0
    _, cache = kvjax.prefill(model(expected.model), MAIN.first, method=method, room=8)
    for tokens in MAIN.steps:
        logits, cache = kvjax.step(model(expected.model), cache, tokens)
        want = [one.step(token, victim=expected.victim) for one, token in zip(rows, tokens, strict=True)]
        worst = max(worst, off(logits, np.stack(want)))
    held = positions(cache)
    return worst, all([lists[b] for lists in held] == one.positions() for b, one in enumerate(rows))


@pytest.mark.parametrize("name", sweep(RIGHT, "several slots merged after a token"))
def test_keeps_that_are_not_refused_answer_as_float64_slots(name):
    worst, same = talk(*RIGHT[name])
    assert worst < 1e-5 and same


@pytest.mark.rotating
def test_steps_would_evict_restore_tokens_which_always_stay():
    method = changed(RESTORE, score=ByLayer(), budget=Budget(12), protect=(Recent(1),), when=STEP)
    with pytest.raises(ValueError, match="its slots are never evicted"):
        check(method)
    with unchecked():
        _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=8)
        for tokens in MAIN.steps:
            _, cache = kvjax.step(model("4/2"), cache, tokens)
    for ids, lists in zip(MAIN.first, positions(cache)[1], strict=True):
        assert not any({len(ids), len(ids) + 1} <= {*held} for held in lists)


@pytest.mark.rotating
@pytest.mark.parametrize("allocate", [AcrossHeads(), Threshold(12.0)])
def test_layers_that_keep_alike_have_budgets_between_heads(allocate):
    """Both layers keep what the first one selects, the newest tokens."""
    budget = 1.0 if isinstance(allocate, Threshold) else 0.5
    got, want = (
        answers(keep(score, budget, allocate=allocate, **more))[0]
        for score, more in ((ByLayer(), dict(reuse=2)), (Position(), {}))
    )
    assert apart(got, want) < 1e-6
    assert apart(answers(keep(ByLayer(), budget, allocate=allocate))[0], want) > 1e-3


@pytest.mark.rotating
def test_traces_that_print_the_same_are_remembered_apart():
    got, want = (keep(Waves((wave(1.0), wave(2.0)))) for wave in (Wave, ShownWave))
    assert apart(answers(got)[0], answers(want)[0]) == 0
    assert apart(answers(got)[0], answers(keep(Waves((Wave(2.0),))))[0]) > 1e-3


@pytest.mark.parametrize("name", sweep(NEEDED))
def test_keeps_that_are_refused_would_answer_wrongly_or_cannot_run(name):
    says, method, right = NEEDED[name]
    assert needed(says, (method,), right)


@pytest.mark.parametrize("name", sweep(WRONG))
def test_keeps_that_are_refused_would_answer_otherwise(name):
    says, method, expected = WRONG[name]
    with pytest.raises(ValueError, match=says):
        check(method)
    with unchecked():
        worst, _ = talk(method, expected)
    assert worst > 1e-3
