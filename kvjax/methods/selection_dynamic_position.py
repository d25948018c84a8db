"""Methods that select after every token without attention: by positions, token ids, keys or values."""

from __future__ import annotations

from typing import Annotated

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.phase import ByRank, Clamped
from kvjax.grammar.stages import PrefillAndDecode
from kvjax.grammar.when import STEP, Every
from kvjax.keep.algebra import AgeDecayed
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.budgets.phases import PromptAndGenerated
from kvjax.keep.gates.controller import Controller, PredictedAttention
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.hashed import HashSimilarity
from kvjax.keep.scores.ladder import Ladder
from kvjax.keep.scores.norms import NormRatio, Rounded
from kvjax.keep.scores.pages import WholePages
from kvjax.keep.scores.score import KeyNorm, Novelty, Position
from kvjax.keep.scores.tokens import IsTokenType, SeparatorsFirst
from kvjax.keep.scores.trigonometric import QueryCentres, Trigonometric
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Bits,
    Fit,
    Group,
    Kernel,
    Page,
    Planes,
    Seed,
    Share,
    TokenIds,
    Tokens,
    Window,
    window_score,
)
from kvjax.store.affine import Affine


@paper(
    "Efficient Streaming Language Models with Attention Sinks",
    arxiv="2309.17453",
    family="selection-dynamic",
    exact="deviates",
    kvpress=Press(
        "KeyRerotationPress(StreamingLLMPress)",
        same="the same set, at the end of the prompt; acts in decoding too",
    ),
    aliases=("streaming-llm",),
)
def streamingllm(budget: Amount, *, sinks: Tokens = 4) -> Method:
    """StreamingLLM (Xiao et al., 2023, arXiv:2309.17453), section 3.2: sinks and a rolling window.

    Rotation is by slot rank inside the cache, not by position in the text, so any length decodes within
    the trained window: a text may grow beyond the model's last position, read in pieces (`chunk=`)
    that fit there together with the budget. Deviation: a prompt is read in one pass with ordinary attention
    before it is cut; the paper streams it token by token.
    """
    keep = Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP, phase=ByRank())
    return Method(keep)


@paper(
    "SnapStream: Efficient Long Sequence Decoding on Dataflow Accelerators",
    arxiv="2511.03092",
    family="selection-dynamic",
    exact="deviates",
)
def snapstream(budget: Amount, *, written: Share = 0.5, window: Window = 32, kernel: Kernel = 5) -> Method:
    """SnapStream (Li et al., 2025, arXiv:2511.03092): SnapKV for a prompt, a ring for generated tokens.

    A prompt keeps its window and the best of its tokens by SnapKV's score, in the share 1 - `written` of the
    budget, and these stay. Generated tokens have the rest, a ring: the oldest of them is evicted after every
    token. Sources: the abstract and beginning of the paper, and summaries of it; there is no public code.
    Deviations: first tokens stay by SnapKV's score, as others do, where the paper adds StreamingLLM's sinks;
    the window of a prompt stays, where it is the beginning of the paper's ring; keys keep their positions;
    the unused share of a short prompt goes to generated tokens.
    """
    score = PromptAndGenerated(window_score(window, kernel, "grouped"), Position(), written, window)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=STEP))


@paper(
    "HashEvict: A Pre-Attention KV Cache Eviction Strategy using Locality-Sensitive Hashing",
    arxiv="2412.16187",
    family="selection-dynamic",
    exact="deviates",
    aliases=("lsh-e",),
)
def hashevict(
    budget: Amount, *, planes: Planes = 16, sinks: Tokens = 4, newest: Tokens = 10, seed: Seed = 0
) -> Method:
    """HashEvict (Liu et al., 2024, arXiv:2412.16187): evicts the key whose hash is least like the query's.

    score[j] = -hamming(sign(R k_j), sign(R q)) of the newest query and `planes` random hyperplanes R, an
    estimate of their cosine. The first `sinks` and the `newest` tokens stay. A prompt keeps its keys of small
    norm, as in a configuration of the authors'. Deviations: as in the paper, the query is hashed, where the
    code of the authors hashes the newest key; a token is attended to before another is evicted, where theirs
    evicts first; the hashes of keys are recomputed from the keys instead of being stored.
    """
    score = PrefillAndDecode(Rounded(KeyNorm()), HashSimilarity(planes, seed))
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(newest)), when=STEP))


@paper(
    "PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large Language Model Inference",
    arxiv="2509.04377",
    family="selection-dynamic",
    exact="deviates",
    aliases=("paged-eviction",),
)
def pagedeviction(budget: Amount, *, page: Page = 16) -> Method:
    """PagedEviction (Chitty-Venkata et al., 2025, arXiv:2509.04377): evicts tokens, later whole pages.

    score[j] = ||v_j|| / ||k_j||. A prompt keeps the best tokens of every head. While decoding, a layer that
    holds a page more than its budget evicts the page with the lowest mean score over all heads, which evict
    the same page. The newest `page` tokens stay. Deviations: every layer chooses separately; a prompt that is
    just one page too long evicts a page.
    """
    score = WholePages(Rounded(NormRatio()), page)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(page),), when=Every(page)))


@paper(
    "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models",
    arxiv="2507.14204",
    family="selection-dynamic",
    exact="deviates",
)
def lacache(
    budget: Amount,
    *,
    step: Annotated[int, Range(2, 64)] = 2,
    kept: Annotated[int, Range(1, 63)] = 1,
    sinks: Tokens = 4,
    newest: Window = 32,
) -> Method:
    """LaCache (Shi et al., 2025, arXiv:2507.14204): layers keep different tokens, so together more.

    Of `step` consecutive tokens every layer keeps `kept`, shifted by one token from layer to layer, starting
    with the oldest tokens; the kept tokens are thinned out again when no others remain (see `Rungs`). In a
    model of L layers, the paper's span S and overlap O are step = 1 + (L - S) / (S - O) and kept = S / (S -
    O), rounded up. Rotation is by rank in the cache, as with StreamingLLM. Deviations: a prompt is read in
    one pass with whole attention before it is cut; eviction starts at two tokens beyond the budget instead of
    one; the authors' code adds half of a step's slots to the budget; if it thins out t times at once and
    keeps several tokens of a step, its steps overlap, and here they do not.
    """
    if kept >= step:
        raise InputError(f"lacache: kept must be less than step, which is {step}, got {kept}")
    keep = Keep(
        Ladder(step, kept, sinks, newest), Budget(budget), Uniform(), (Sink(sinks), Recent(newest)),
        when=Every(2), phase=ByRank(),
    )  # fmt: skip
    return Method(keep)


@paper(
    "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models",
    arxiv="2308.16137",
    family="selection-dynamic",
    exact="deviates",
)
def lm_infinite(budget: Amount, *, sinks: Tokens = 10, distance: Window = 4096) -> Method:
    """LM-Infinite (Han et al., 2023, arXiv:2308.16137), section 4: first and newest tokens, never too far.

    The logit of query i and key j is q_i R(d) k_j / sqrt(H) with d = min(i - j, `distance`), so the first
    tokens are seen at `distance` however long the text is; it may exceed the model's positions if it is read
    in pieces (`chunk=`) that fit in them together with `distance`. distance: the length that the model was
    trained on. Deviation: a prompt is read in one pass over all of its tokens, at such distances, before it
    is cut, where the paper hides the middle from its later tokens, too; and its optional few middle tokens,
    chosen by attention, are left out.
    """
    phase = Clamped(distance)
    return Method(Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP, phase=phase))


@paper(
    "SepLLM: Accelerate Large Language Models by Compressing One Segment into One Separator",
    arxiv="2412.12094",
    family="selection-dynamic",
    exact="deviates",
)
def sepllm(
    budget: Amount, *, separators: TokenIds | None = None, sinks: Tokens = 4, window: Window = 256
) -> Method:
    """SepLLM (Chen et al., 2024, arXiv:2412.12094), training-free: separators represent their segments.

    The first `sinks` tokens, the `window` newest ones and separators stay, in prompts and while decoding; the
    remaining budget goes to the newest of the other tokens, and if there are more separators than fit, the
    oldest are evicted. separators: their token ids; None takes tokens with one of .,?!;: or a line's end, and
    no letter or digit, from the model's tokenizer. Deviation: a prompt is read with whole attention before it
    is cut, and tokens are cut one by one, where the paper's cache does so whenever it is full.
    """
    score, protect = SeparatorsFirst(IsTokenType(separators)), (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(budget), Uniform(), protect, when=STEP))


@paper(
    "SirLLM: Streaming Infinite Retentive LLM",
    arxiv="2405.12528",
    family="selection-dynamic",
    exact="deviates",
)
def sirllm(
    budget: Amount,
    *,
    sinks: Tokens = 4,
    window: Window = 64,
    decay: Annotated[float, Range(0.01, 1)] = 1.0,
    turn: Window = 256,
) -> Method:
    """SirLLM (Yao et al., 2024, arXiv:2405.12528), section 3: keeps surprising tokens for a while.

    score[j] = decay^(age_j / turn) (-log p(x_j | x_<j)); the first `sinks` and the `window` newest tokens
    stay. Keys are rotated by rank in the cache, as in StreamingLLM. decay=1, the default of the authors'
    code, forgets nothing; their README takes 0.7 and 0.9 for dialogues. Deviations: entropy decays over
    `turn` tokens, where the paper multiplies it once for every round of a dialogue; it acts at the end of
    every prompt, and generated tokens have no entropy, so that they are evicted first in the next turn.
    """
    score, protect = AgeDecayed(Novelty(), decay, turn), (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(budget), Uniform(), protect, phase=ByRank()))


@paper(
    "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
    arxiv="2604.04921",
    family="selection-dynamic",
    exact="deviates",
)
def triattention(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    every: Window = 128,
    farthest: Annotated[int, Range(1, 2**20)] = 65536,
) -> Method:
    """TriAttention (Mao et al., 2026, arXiv:2604.04921): scores keys by the centres of unrotated queries.

    Queries and keys are concentrated about centres before RoPE, so a key's future logit is a trigonometric
    series in its distance to future queries (`Trigonometric`). After every `every` tokens, and at the end of
    prompts, each head evicts down to its budget. fitted: the centres, as `kvjax fit triattention` writes
    them. Deviation: every head chooses by its own group's scores, which is an option of the authors' code
    beside one choice for all heads and layers; a prompt's tokens compete with generated ones.
    """
    score = Trigonometric(QueryCentres(as_fitted(fitted)), farthest)
    return Method(Keep(score, Budget(budget), Uniform(), when=Every(every)))


@paper(
    "Efficient Sparse Attention needs Adaptive Token Release",
    arxiv="2407.02328",
    family="selection-dynamic",
    exact="deviates",
)
def adore(
    budget: Amount, *, newest: Tokens = 32, bits: Bits | None = 2, group: Group | None = 32,
    fitted: Fit | None = None,
) -> Method:  # fmt: skip
    """ADORE (Zhang et al., 2024, arXiv:2407.02328), section 3: a controller decides which tokens to keep.

    A GRU runs over the tokens, and after every token predicts which tokens the next query will attend to;
    these are kept (`PredictedAttention`), and the least expected one is released. fitted: the controller,
    as `kvjax fit adore` writes it. Deviations: released tokens move to a second tier of `bits` bits, in
    groups of `group` channels (None: all of a head), and are still attended to, where the paper drops
    them and recomputes those that are expected again; with bits=None they are dropped for good. A later
    prompt chooses among all tokens again, as they are stored. Every layer has a GRU over its own inputs
    and every head its own scores, where the paper has one for the whole stack; the `newest` tokens always
    stay, because the controller does not know how old a token is. The authors' code is not public, and
    the form of the network's output is ours.

    On the shipped model a fit of two minutes lowers the cross-entropy of its predictions from 0.69 to 0.33.
    With a quarter of the tokens alone, it then answers 9 of 24 questions after texts of 256 tokens, compared
    with 3 for an unfitted controller and 2 for H2O; with all other tokens in 2 bits, all 24 are answered by
    each of them.
    """
    lower = None if bits is None else Store(Affine(bits, group=group), Affine(bits, group=group))
    score = PredictedAttention(Controller(as_fitted(fitted)))
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(newest),), when=STEP, lower=lower))
