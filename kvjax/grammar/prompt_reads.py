"""Protocol of reads in prompts: the words that say which blocks of keys the queries of a prompt attend to."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float, Int

from kvjax.grammar.facts import Fact, Reasons, Stating
from kvjax.ops.attention.block_sparse import Picks


class PromptQueries(NamedTuple):
    """The queries and keys of a first prompt in one layer, padded on the right to whole segments and blocks.

    Args:
        q: rotated queries.
        k: keys as queries meet them.
        pos: positions; -1 on padding.
        length: tokens of each row.
        scale: the factor on logits.
        below: what the read left in the nearest layer below in which it acts; None if there is none.
        taught: the layer's fitted arrays, by digest.

    >>> PromptQueries._fields[:3]
    ('q', 'k', 'pos')
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    pos: Int[Array, "B T"]
    length: Int[Array, "B"]
    scale: float
    below: Any = None
    taught: Any = None


@runtime_checkable
class PromptRead(Protocol):
    """Picks the blocks of keys that segments of a first prompt's queries attend to (`Method.read_prompt`).

    It acts in layers without a window. Prompts over a cache, single tokens, and prompts of at most
    `read_whole` tokens attend to all that they see. Optional: `carries`: whether layers need what the read
    left in the layer below; `share(tokens)`: the share of the pairs of a segment and a block it sees that is
    computed for a prompt of so many tokens, where the data does not decide it.

    >>> from kvjax.words import Budget, SegmentScores
    >>> isinstance(SegmentScores(Budget(0.25)), PromptRead)
    True
    """

    @property
    def segment(self) -> int:
        """How many queries attend to the same blocks."""
        ...

    @property
    def block(self) -> int:
        """How many keys form a block."""
        ...

    @property
    def skip_layers(self) -> int:
        """How many of the first layers attend to everything."""
        ...

    @property
    def read_whole(self) -> int:
        """Up to how many tokens all of a prompt is attended to."""
        ...

    def pick(self, prompt: PromptQueries) -> tuple[Picks, Any]:
        """What every segment attends to, and what the layer above gets as `below` (None for nothing).

        A segment's own tokens must be among it, and it is picked for each row by its own tokens alone.
        """
        ...


def carries(read: PromptRead | None) -> bool:
    """Whether a read needs what it left in the layer below."""
    return bool(getattr(read, "carries", False))


class PromptReadFacts(Stating):
    """The facts of reads in prompts, which compare queries with keys where both stand.

    >>> from kvjax.words import SegmentScores
    >>> issubclass(SegmentScores, PromptReadFacts)
    True
    """

    @property
    def requires(self) -> Reasons:
        return {Fact.KEYS_BY_POSITION: "compares a prompt's queries with keys at their positions"}

    @property
    def breaks(self) -> Reasons:
        return {Fact.DENSE_PROMPTS: "leaves blocks out of a prompt's attention"}
