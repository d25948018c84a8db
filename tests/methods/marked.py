"""What methods with marked tokens and memory tokens leave of a prompt, in float64 numpy.

Nobody fitted their arrays. They are for the model "4/2", as those in `tests.methods.learned`.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf

from kvjax.grammar.fitted import Fitted
from tests.float64.reference import Prompt, best, rms_norm, rope, softmax
from tests.methods.learned import CHANNELS, HEADS, KV_HEADS, LAYERS, WIDTH, made_up, of_layer
from tests.methods.rows import THETA, count

LOW = 3
ADAPTER = {
    **{f"{name}_down": (WIDTH, LOW) for name in "qkv"},
    "o_down": (HEADS * CHANNELS, LOW), "o_up": (LOW, HEADS * CHANNELS),
    "q_up": (LOW, HEADS * CHANNELS), "k_up": (LOW, KV_HEADS * CHANNELS), "v_up": (LOW, KV_HEADS * CHANNELS),
}  # fmt: skip


def of_all_layers(word, shapes, more, seed):
    """Arrays of every layer, and some of which one row stands for all layers."""
    rng, arrays = np.random.default_rng(seed + 100), made_up(word, shapes, seed).arrays
    arrays = {name: 0.3 * x for name, x in arrays.items()}
    return Fitted(
        arrays | {n: rng.normal(size=(1, *s)).astype(np.float32) for n, s in more.items()}, word, ""
    )


SCORER_LAYER = 1
DISTILLED = of_all_layers(
    "TokenScorer", ADAPTER, {"in": (WIDTH, 6), "in_bias": (6,), "out": (6, 1), "out_bias": (1,)}, 18
)


# Where all tokens stay, only weights without effect leave them as they are.
WITHOUT_EFFECT = Fitted(
    {n: x * (not n.endswith("_up")) for n, x in DISTILLED.arrays.items()}, "TokenScorer", ""
)


def scorer(x):
    """Compute a scorer's numbers of tokens with inputs x [T, D] of its layer."""
    a = {name: y[0].astype(np.float64) for name, y in DISTILLED.arrays.items()}
    h = x @ a["in"] + a["in_bias"]
    return (h * (1 + erf(h / np.sqrt(2))) / 2 @ a["out"] + a["out_bias"])[:, 0]


class Read:
    """What a reading leaves, as `tests.float64.reference.Prompt` says it.

    x: the embeddings of what is read, in rows. at: their positions. sees: which of them a query attends to
    [T, T], or a list of one for each layer. marked: which of them have the weights of `fitted`.
    """

    def __init__(self, decoder, x, at, sees, marked, fitted, past=None):
        c, self.decoder = decoder.config, decoder
        self.raw_q, self.raw_k, self.v, self.q, self.k, self.p, self.hidden = ([] for _ in range(7))
        heads = lambda y: y.reshape(len(x), -1, CHANNELS).swapaxes(0, 1)  # noqa: E731
        for layer, weights in enumerate(decoder.layers):
            h, a = rms_norm(x, weights["attn_norm"], c.norm_eps), of_layer(fitted, layer)
            more = (heads(marked[:, None] * (h @ a[f"{n}_down"] @ a[f"{n}_up"])) for n in "qkv")
            raw_q, raw_k, v = (y + z for y, z in zip(decoder.project(weights, x), more, strict=True))
            q, k = rope(raw_q, at, THETA), rope(raw_k, at, THETA)
            keys, values = (k, v) if past is None else (
                np.concatenate([old[layer], new], 1) for old, new in zip(past, (k, v), strict=True)
            )  # fmt: skip
            s = q @ np.repeat(keys, c.heads // c.kv_heads, 0).swapaxes(1, 2) / np.sqrt(CHANNELS)
            p = softmax(np.where(sees[layer] if isinstance(sees, list) else sees, s, -np.inf))
            for name in ("raw_q", "raw_k", "v", "q", "k", "p"):
                getattr(self, name).append(locals()[name])
            self.hidden.append(h)
            out = p @ np.repeat(values, c.heads // c.kv_heads, 0)
            flat = out.swapaxes(0, 1).reshape(len(x), -1)
            x = decoder.finish(weights, x, out + heads(marked[:, None] * (flat @ a["o_down"] @ a["o_up"])))
        self.all_logits = decoder.logits(x)


def distilled(prompt):
    """Read the prompt again, chosen tokens with weights of their own, except the last token."""
    chosen = distilled_tokens(prompt)
    marked = chosen & (np.arange(prompt.length) < prompt.length - 1)
    at = np.arange(prompt.length)
    x = prompt.decoder.rest["embed"][np.asarray(prompt.tokens)]
    found = Read(prompt.decoder, x, at, at[None] <= at[:, None], marked, DISTILLED)
    found.tokens, found.length, found.at, found.group = prompt.tokens, prompt.length, prompt.at, prompt.group
    found.chosen = chosen
    return found


def distilled_tokens(prompt):
    score = scorer(prompt.hidden[SCORER_LAYER])
    score[-1] = np.inf
    return best(score, count(prompt.length))


def distilled_kept(found):
    return [np.tile(found.chosen, (KV_HEADS, 1)) for _ in range(LAYERS)]


def memory_of(tokens, by, seed):
    return of_all_layers("MemoryTokens", ADAPTER, {"memory": (tokens, WIDTH)}, seed)


class Remembers:
    """Prompts of which memory tokens stay: read chunk by chunk, and their last token behind all."""

    def __init__(self, fitted, tokens, chunk=None, mean=False):
        self.fitted, self.tokens, self.chunk, self.mean = fitted, tokens, chunk, mean

    def __call__(self, prompt):
        """Return what stays, as a prompt of memory tokens and the last token."""
        d, g, text = prompt.decoder, self.tokens, prompt.tokens[:-1]
        embed, size = d.rest["embed"], self.chunk or max(len(text), 1)
        memory = self.fitted.arrays["memory"][0].astype(np.float64)
        raw, values, chunks = [], [], [text[i : i + size] for i in range(0, len(text), size)]
        for ids in chunks:
            x = np.concatenate([embed[np.asarray(ids)], memory])
            old = self.held(raw, values)
            many = 0 if old is None else old[0][0].shape[1]
            at = many + np.arange(len(x))
            sees = np.concatenate([np.ones((len(x), many), bool), at[None] <= at[:, None]], 1)
            marked = np.arange(len(x)) >= len(ids)
            read = Read(d, x, at, sees, marked, self.fitted, self.turned(old))
            raw.append([y[:, -g:] for y in read.raw_k])
            values.append([y[:, -g:] for y in read.v])
        old = self.held(raw, values)
        many = 0 if old is None else old[0][0].shape[1]
        sees = np.ones((1, many + 1), bool)
        last = embed[np.asarray(prompt.tokens[-1:])]
        found = Read(d, last, [many], sees, np.zeros(1), self.fitted, self.turned(old))
        return self.joined(prompt, found, old, np.arange(many + 1))

    def held(self, raw, values):
        """Unrotated keys and values of the memory, per layer; None where there is none yet."""
        if not raw:
            return None
        join = (lambda xs: np.mean(xs, 0)) if self.mean else (lambda xs: np.concatenate(xs, 1))
        return [[join([one[i] for one in each]) for i in range(LAYERS)] for each in (raw, values)]

    def turned(self, old):
        if old is None:
            return None
        return [[rope(k, np.arange(k.shape[1]), THETA) for k in old[0]], old[1]]

    def joined(self, prompt, found, old, at, length=None):
        """Join what stays: memory and the last token behind it. at: their positions. length: of the cache."""
        many = len(at) - 1
        if old is not None:
            found.raw_k = [np.concatenate(pair, 1) for pair in zip(old[0], found.raw_k, strict=True)]
            found.v = [np.concatenate(pair, 1) for pair in zip(old[1], found.v, strict=True)]
        found.length, found.group = length or many + 1, prompt.group
        found.tokens = [0] * many + prompt.tokens[-1:]
        found.at = [at] * LAYERS
        wide = lambda x, n: np.zeros((*x.shape[:-n], *[many + 1] * n))  # noqa: E731
        found.p = [wide(x, 2) for x in found.p]
        found.q = [np.zeros((HEADS, many + 1, CHANNELS)) for _ in found.q]
        found.hidden = [np.zeros((many + 1, WIDTH)) for _ in found.hidden]
        return found


class RunsRemember(Remembers):
    """Prompts of whose runs memory tokens stay that see each other both ways, where their tokens stood."""

    def __init__(self, fitted, tokens, ratio):
        super().__init__(fitted, tokens, tokens * ratio)
        self.ratio = ratio

    def __call__(self, prompt):
        d, text = prompt.decoder, prompt.tokens[:-1]
        embed, memory = d.rest["embed"], self.fitted.arrays["memory"][0].astype(np.float64)
        raw, values, stood = [], [], np.zeros(0, int)
        for first in range(0, len(text), self.chunk):
            ids = text[first : first + self.chunk]
            size, many = len(ids), -(-len(ids) // self.ratio)
            mine = first + np.minimum(self.ratio * np.arange(1, many + 1), size) - 1
            at, order = np.concatenate([first + np.arange(size), mine]), np.arange(size + many)
            among = (order[None] <= order[:, None]) | (order[:, None] >= size)
            sees = np.concatenate([np.ones((size + many, len(stood)), bool), among], 1)
            x = np.concatenate([embed[np.asarray(ids)], memory[:many]])
            past = self.at_positions(self.held(raw, values), stood)
            read = Read(d, x, at, sees, order >= size, self.fitted, past)
            raw.append([y[:, -many:] for y in read.raw_k])
            values.append([y[:, -many:] for y in read.v])
            stood = np.concatenate([stood, mine])
        old, last = self.held(raw, values), embed[np.asarray(prompt.tokens[-1:])]
        sees, past = np.ones((1, len(stood) + 1), bool), self.at_positions(old, stood)
        found = Read(d, last, [len(text)], sees, np.zeros(1), self.fitted, past)
        return self.joined(prompt, found, old, np.append(stood, len(text)), len(text) + 1)

    def at_positions(self, old, at):
        return None if old is None else [[rope(k, at, THETA) for k in old[0]], old[1]]


GISTS, COMPS, CHUNK = 3, 2, 5
GIST = memory_of(GISTS, "gisting", 19)
COMP = memory_of(COMPS, "ccm", 20)
MEMORIES, RATIO, RUN = 2, 3, 6


def runs_kept(found):
    """Return the positions that are kept."""
    return [np.tile(np.isin(np.arange(found.length), at), (KV_HEADS, 1)) for at in found.at]


RUNS = of_all_layers("RunMemory", ADAPTER, {"memory": (MEMORIES, WIDTH), "repeat": (WIDTH,)}, 21)


def after(prompt, many):
    """Which slots `many` tokens after a prompt attend to: those of each layer, and earlier ones of theirs."""
    order = np.arange(many)
    causal = order[None] <= order[:, None]
    return [np.concatenate([np.ones((many, k.shape[1]), bool), causal], 1) for k in prompt.k]


class Restores:
    """Prompts behind which learned tokens are read over all slots; these stay, and KVzip's best of others."""

    def __init__(self, fitted, tokens, prefix, sinks):
        self.fitted, self.tokens, self.prefix, self.sinks = fitted, tokens, prefix, sinks

    def __call__(self, prompt):
        """Return the prompt and its restore tokens, as a prompt of both."""
        t, many = prompt.length, self.tokens
        memory, at = self.fitted.arrays["memory"][0].astype(np.float64), t + np.arange(many)
        found = Read(
            prompt.decoder, memory, at, after(prompt, many), np.ones(many), self.fitted, (prompt.k, prompt.v)
        )
        for name in ("raw_q", "q", "raw_k", "k", "v"):
            pairs = zip(getattr(prompt, name), getattr(found, name), strict=True)
            setattr(found, name, [np.concatenate(pair, 1) for pair in pairs])
        found.hidden = [np.concatenate(pair) for pair in zip(prompt.hidden, found.hidden, strict=True)]
        found.at = [np.append(old, at) for old in prompt.at]
        found.p = [np.zeros((HEADS, len(one), len(one))) for one in found.at]
        found.tokens = [*prompt.tokens, *[0] * many]
        found.length, found.group, found.prompt = t + many, prompt.group, prompt
        return found

    def kept(self, found):
        """Give what restore tokens leave of the budget to slots that repeating the prompt asks for."""
        prompt, t = found.prompt, found.prompt.length
        again = Prompt(prompt.decoder, [*prompt.tokens, *self.prefix, *prompt.tokens])
        scores = [p[:, t:, :t].reshape(KV_HEADS, -1, len(p[0]) - t, t).max((1, 2)) for p in again.p]
        flat = np.where(np.arange(t) < self.sinks, np.inf, np.stack(scores)).reshape(1, -1)
        stays = best(flat, [LAYERS * KV_HEADS * (count(t) - self.tokens)]).reshape(LAYERS, KV_HEADS, t)
        mine = np.ones((LAYERS, KV_HEADS, self.tokens), bool)
        return list(np.concatenate([stays, mine], 2))


RESTORED = Restores(of_all_layers("RestoreTokens", ADAPTER, {"memory": (2, WIDTH)}, 23), 2, (5, 7, 11), 1)
