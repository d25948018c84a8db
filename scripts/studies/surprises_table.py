"""Methods below random eviction on the leaderboard, the cause, and the comparison that shows it."""

from __future__ import annotations

from typing import NamedTuple


class Surprise(NamedTuple):
    """The cause for some methods, and the methods to compare.

    protocol: whether the question is seen before compression ("aware-unprotected") or not. budget: that of
    the comparison.
    """

    methods: tuple[str, ...]
    text: str
    compared: str
    protocol: str = "agnostic"
    budget: float = 0.5

    @property
    def found(self) -> str:
        """The text on one line."""
        return " ".join(self.text.split())

    @property
    def command(self) -> str:
        """The comparison that shows it."""
        more = f"--budgets {self.budget} --protocol {self.protocol} --samples 30"
        return f"kvjax compare --methods {self.compared} {more}"


_LAYERS = " ".join(f"'scripts/studies/controls.py:snapkv_layer:layer={i}'" for i in range(4))
_TOVA = " ".join(
    f"scripts/studies/controls.py:{name}" for name in ("random_alike", "tova_apart", "tova_longer")
)
_ROUND = "'scripts/studies/controls.py:turned_round:of={}'"

SURPRISES = (
    Surprise(
        ("restorekv",),
        """
        The protocol, not the method: its tokens belong between a context and a question, and where the
        question is compressed with its context they stand between it and its answer. Of 24 answers to
        `get` at half of the slots, given the true tokens before, the first tokens are all right and the
        second ones all wrong, because they look at what stands right before them; with KVzip all are
        right. For questions behind it 98% are right.
        """,
        "restorekv kvzip random",
    ),
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
        "random l2compress scripts/studies/controls.py:large_keys "
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
        "random lacache scripts/studies/controls.py:random_alike",
    ),
    Surprise(
        ("scope", "shotkv"),
        """
        The papers' settings. Half of the budget belongs to what is written, and answers here are a few tokens
        long, so a prompt has a quarter of its tokens where others have half. With a twentieth for what is
        written SCOPE scores 42 in place of 20, and ShotKV 36 in place of 21.
        """,
        "random scope scope:written=0.05 shotkv shotkv:written=0.05",
    ),
    Surprise(
        ("laq", "finch", "citrus", "morphkv"),
        """
        The methods, where the question is not seen: they ask what the end of a context wants, or the tokens
        that would follow it, and both are filler here. LAQ scores 25, but 97 where the question is seen;
        FINCH, CItruS and MorphKV score 28 to 30, as random eviction does with these 30 contexts (29), and 31
        to 34 where they ask 128 tokens.
        """,
        "random laq finch finch:question=128 citrus citrus:question=128 morphkv morphkv:window=128",
    ),
    Surprise(
        ("nacl",),
        """
        The method, and TOVA's reason: it asks the last queries of a context, each slot for itself. Chosen by
        their attention alone (share=1), half of the cache scores 28, as SnapKV does without its pooling over
        neighbours (29; 42 with it), and drawn alone (share=0) 31, as random eviction (29). Both together
        score 33 on these 30 contexts, and less than random eviction on the leaderboard's 100.
        """,
        "random nacl nacl:share=1.0 nacl:share=0.0 snapkv snapkv:kernel=1",
    ),
    Surprise(
        ("kv-compress",),
        """
        The method's premise, as with DynamicKV: slots go to the best scores of the whole stack, and squared
        attention is largest in the last layers. It scores 18 at half of the cache, and 29 where all layers
        have equal budgets; where the question is seen, 19 and 41.
        """,
        "random kv-compress 'scripts/studies/controls.py:equal_layers:of=kv-compress'",
    ),
    Surprise(
        ("prefixkv", "pyramidinfer"),
        """
        The methods: all heads of a layer keep the same tokens, which costs random eviction a third of its
        score (29 to 19). PrefixKV scores 23, and 30 where all layers have equal budgets; PyramidInfer 24, and
        25 so.
        """,
        "random scripts/studies/controls.py:random_alike "
        + " ".join(
            f"{m} 'scripts/studies/controls.py:equal_layers:of={m}'" for m in ("prefixkv", "pyramidinfer")
        ),
    ),
    Surprise(
        ("curdkv", "prefixkv", "lococo"),
        """
        Where the question is seen, what has been read last is the question, and these methods may drop or mix
        it: few queries have seen its tokens, and their keys are small. With the newest 32 tokens kept,
        CurDKV scores 36 in place of 26, PrefixKV 29 in place of 16, and LoCoCo, whose authors' code has no
        newest tokens by default, 39 in place of 23; random eviction scores 32.
        """,
        "random curdkv 'scripts/studies/controls.py:newest_kept:of=curdkv' prefixkv "
        "'scripts/studies/controls.py:newest_kept:of=prefixkv' lococo lococo:newest=32",
        protocol="aware-unprotected",
    ),
    Surprise(
        ("compressive-transformer",),
        """
        The method without its training: a mean of three keys and values answers nothing, so what it pools is
        lost. It scores 21 at half of the cache, 23 with means of two, and 38 where nine tenths of the budget
        are tokens as they are.
        """,
        "random compressive-transformer compressive-transformer:rate=2 compressive-transformer:recent=0.9",
    ),
    Surprise(
        ("buzz",),
        """
        The method: it samples one of five tokens of the past at equal distances, where others choose, and the
        newest tokens have three tenths of the budget. BUZZ scores 22 at half of the cache, 28 where it
        samples one of two, and 38 where newest tokens have nine tenths.
        """,
        "random buzz buzz:stride=2 buzz:recent=0.9",
    ),
    Surprise(
        ("keepkv",),
        """
        The method: it merges what H2O drops into kept tokens whose keys are similar, and the kept ones become
        less sharp. KeepKV scores 29 with these 30 contexts, as random eviction does, and 35 where only keys
        of a cosine above 0.99 are merged.
        """,
        "random h2o keepkv keepkv:threshold=0.99",
    ),
    Surprise(
        ("d2o",),
        """
        The method: at an eighth of the cache seven tokens join every slot that stays, in a mean by weights,
        and answers are copied from single tokens. D2O scores 4, 10 where it drops what it would merge, H2O
        11, and random eviction 6.
        """,
        "random h2o d2o 'scripts/studies/controls.py:without_merge:of=d2o'",
        protocol="aware-unprotected",
        budget=0.125,
    ),
    Surprise(
        ("zeromerge",),
        """
        The measured form, which merges evicted slots into the kept ones of the least attention. The newest
        tokens have received the least, so a question at the end of a prompt becomes a mean of evicted slots:
        ZeroMerge scores 15 where the question is seen. The authors' code, and the library, keep the newest
        tokens as they are: that form scores 34; random eviction scores 32.
        """,
        "random h2o zeromerge",
        protocol="aware-unprotected",
    ),
)

BELOW_SINK_RECENT = """
Many methods lie between random eviction and sink-recent, which is hard to beat here where the question
is not seen: what its window holds it holds whole, in all heads and layers, so it answers 90% and more of
the questions about it, and 10% and less of the others (`pytest -m slow tests/eval/test_claims.py`).
Tokens that are kept apart from each other answer a question where no part of what it needs is lost.
ChunkKV, which keeps runs of tokens, scores as much (42).
"""
