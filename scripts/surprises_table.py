"""Methods below random eviction on the leaderboard, what is to blame, and the comparison that shows it."""

from __future__ import annotations

from typing import NamedTuple


class Surprise(NamedTuple):
    """What was found of some methods, and the methods to compare, at half of the cache and agnostic."""

    methods: tuple[str, ...]
    text: str
    compared: str

    @property
    def found(self) -> str:
        """The text on one line."""
        return " ".join(self.text.split())

    @property
    def command(self) -> str:
        """The comparison that shows it."""
        more = "--budgets 0.5 --protocol agnostic --samples 30"
        return f"kvjax compare --methods {self.compared} {more}"


_LAYERS = " ".join(f"'scripts/controls.py:snapkv_layer:layer={i}'" for i in range(4))
_TOVA = " ".join(f"scripts/controls.py:{name}" for name in ("random_alike", "tova_apart", "tova_longer"))

SURPRISES = (
    Surprise(
        ("dynamickv", "zigzagkv"),
        """
        The method's premise, not our form of it. On recall-tiny nearly all that answers need is copied by the
        second of four layers. SnapKV's choice scores 42 at half of the cache; where that layer has 1.9 times
        the mean it scores 89, and 30 to 31 where any other layer has. DynamicKV gives layers slots in
        proportion to how many of the stack's best scores they hold, and the last two layers attend most
        sharply to the end of the prompt: its heads keep 20, 121, 426 and 445 slots from the first layer to
        the last, and the score is 17. ZigZagKV gives more to layers whose attention is spread, here the last
        two again: 169, 167, 346 and 329 slots, and 29. CAKE's entropy times variance finds the second layer
        (92, 461, 220, 238), and so does EvolKV's search, which looks at answers alone. Counts are those of
        the papers' equations, held against float64.
        """,
        f"snapkv dynamickv zigzagkv cake {_LAYERS}",
    ),
    Surprise(
        ("tova",),
        """
        The method. Scores and sets are those of kvpress' TOVAPress to 1e-5. Where the question is not seen,
        the last token of a context asks for nothing that a later question needs: at half of the cache TOVA
        scores 12, and 15 where every head drops its own tokens. With the last 16 queries in place of one it
        is 23. That all heads of a layer drop the same tokens costs as much: random eviction scores 29, and 19
        where heads agree, because a token that one head has lost can still be found by another one. Where
        the question is seen, TOVA is above random eviction on the leaderboard.
        """,
        f"random tova {_TOVA}",
    ),
)
