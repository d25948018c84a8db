"""Reads in prompts: the words that say which blocks of keys the queries of a prompt attend to."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float, Int

from kvjax.grammar.facts import Fact, Reasons, Stating
from kvjax.ops.attention.block_sparse import Picks


class PromptQueries(NamedTuple):
    """The queries and keys of a first prompt in one layer, padded on the right to whole segments and blocks.

    Args:
        q: rotated queries.
        k: keys, rotated for queries.
        pos: positions; -1 on padding.
        length: tokens of each row.
        scale: the factor on logits.
        below: what the read left in the nearest layer below in which it acts; None if there is none.
        fitted: the layer's fitted arrays, by digest.

    >>> PromptQueries._fields[:3]
    ('q', 'k', 'pos')
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    pos: Int[Array, "B T"]
    length: Int[Array, "B"]
    scale: float
    below: Any = None
    fitted: Any = None


class PromptRead(Stating):
    """The base class of reads in prompts, which pick the blocks of keys that segments of queries attend to.

    It acts in layers without a window. Prompts over a cache, single tokens, and prompts of at most
    `read_whole` tokens attend to all that they see. `segment`: how many queries attend to the same blocks.
    `block`: how many keys form a block. `skip_layers`: how many of the first layers attend to everything.
    `carries`: whether layers need what the read left in the layer below.

    >>> from kvjax.words import Budget, SegmentScores
    >>> isinstance(SegmentScores(Budget(0.25)), PromptRead)
    True
    """

    segment: int
    block: int
    skip_layers: int
    read_whole: int
    carries: bool = False

    @property
    def requires(self) -> Reasons:
        return {Fact.KEYS_BY_POSITION: "compares a prompt's queries with keys at their positions"}

    @property
    def breaks(self) -> Reasons:
        return {Fact.DENSE_PROMPTS: "leaves blocks out of a prompt's attention"}

    def share(self, tokens: int) -> float | None:
        """Compute the share of the pairs of a segment and a block it sees that a prompt of `tokens` computes.

        None: the data decides it.
        """
        return None

    @abstractmethod
    def pick(self, prompt: PromptQueries) -> tuple[Picks, Any]:
        """Pick what every segment attends to, and what the layer above gets as `below` (None for nothing).

        A segment's own tokens must be among it, and it is picked for each row by its own tokens alone.
        """
        raise NotImplementedError
