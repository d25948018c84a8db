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
_ROUND = "'scripts/controls.py:turned_round:of={}'"

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
    Surprise(
        ("q-filters", "expected-attention", "triattention", "lukv"),
        """
        The premise that queries to come are like the mean of those that were. The mean query of a text is one
        of its filler here, and keys that an answer needs lie on its other side: at half of the cache
        Q-Filters scores 14 and random eviction 29, but Q-Filters turned round, which keeps the keys that lie
        farthest from where queries do, 73. Expected Attention, which adds the spread of queries, scores 20,
        and turned round 42; TriAttention ranks by mean queries, too, with 15, and LU-KV, which gives other
        budgets to Expected Attention's choice, stays at 20. Signs and scores are those of the authors' code:
        with the same filters and statistics they equal kvpress' to 1e-5.
        """,
        f"random q-filters {_ROUND.format('q-filters')} expected-attention "
        f"{_ROUND.format('expected-attention')} triattention lukv",
    ),
    Surprise(
        ("l2compress", "pagedeviction", "hashevict", "capkv"),
        """
        The geometry that they trust in. Here keys that answers need have large norms and lie apart from the
        queries of filler, so the opposite of each method is far better than random eviction (29 at half of
        the cache): L2Compress, which keeps small keys, scores 17, and large keys 60; PagedEviction, which
        keeps pages of large values over small keys, 18, and turned round 48; HashEvict, whose hashes keep
        what points as the newest query does, 18 and 56; CapKV, which adds what lies where queries do, 11
        and 79. L2Compress' scores are those of kvpress, the others' are held against float64.
        """,
        "random l2compress scripts/controls.py:large_keys "
        + " ".join(f"{name} {_ROUND.format(name)}" for name in ("pagedeviction", "hashevict", "capkv")),
    ),
    Surprise(
        ("a2sf", "sage-kv", "corm"),
        """
        The methods, and TOVA's reason: they ask a few queries at the end of a context, and those want nothing
        that a later question does. SAGE-KV asks the last one and scores 17 at half of the cache; A2SF
        forgets four fifths of what it saw with every query and scores 17, and 27 where it forgets a tenth;
        CORM drops what none of the newest queries found important, and scores 18. SnapKV's 16 queries,
        pooled over neighbours, score 42.
        """,
        "random sage-kv a2sf a2sf:forgetting=0.9 corm snapkv",
    ),
    Surprise(
        ("lacache",),
        """
        The method. Its ladder gives each layer another stretch of the text, the same for all heads. What the
        second layer lacks is lost, and there all heads lack the same tokens: LaCache scores 16 at half of the
        cache, and random eviction 29, but 19 where the heads of a layer agree.
        """,
        "random lacache scripts/controls.py:random_alike",
    ),
)
