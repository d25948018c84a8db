"""Selection after every token that looks at no attention: by where tokens stand, or what they are."""

from __future__ import annotations

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.patterns import Sink
from kvjax.keep.score import Position
from kvjax.methods.papers import Press, paper
from kvjax.methods.shared import Amount, Tokens, Window
from kvjax.phase import ByRank, Clamped
from kvjax.when import STEP


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
    "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models",
    arxiv="2308.16137",
    family="selection-dynamic",
    exact="deviates",
)
def lm_infinite(budget: Amount, *, sinks: Tokens = 10, distance: Window = 4096) -> Method:
    """LM-Infinite (Han et al., 2023, arXiv:2308.16137), section 4: first and newest tokens, never too far.

    The logit of query i and key j is q_i R(d) k_j / sqrt(H) with d = min(i - j, `distance`), so the first
    tokens are met at `distance` however long the text is, which may grow beyond the model's last position,
    read in pieces (`chunk=`) that fit there behind `distance`. distance: the length that the model was
    trained on. Deviation: a prompt is read in one pass over all of its tokens, at such distances, before it
    is cut, where the paper hides the middle from its later tokens, too; and its optional few middle tokens,
    chosen by attention, are left out.
    """
    phase = Clamped(distance)
    return Method(Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP, phase=phase))
