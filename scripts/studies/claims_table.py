"""The claims of papers about their methods, each in one line, and the comparison here that tests it.

A claim is about the paper's models and tasks; tested is its direction on those of the leaderboard. Entries
are in the order of the library.
"""

from __future__ import annotations

from typing import NamedTuple

# The budgets of the leaderboard.
AWARE, AGNOSTIC = "aware-unprotected", "agnostic"


class Better(NamedTuple):
    """The method scores higher than another one at the same budgets."""

    other: str
    budgets: tuple[float | None, ...] = (0.25, 0.125)
    protocol: str = AWARE


class Near(NamedTuple):
    """The method scores at most `within` less than another one: the full cache, or one at the same budget.

    percent: the most bytes that it may keep, in percent of the full cache, if the claim is about less memory.
    Caches are in float32 here, so for codes it is half of the share of 16 bits that a paper claims.
    """

    budgets: tuple[float | None, ...] = (None,)
    within: float = 0.05
    protocol: str = AWARE
    other: str = "full"
    percent: float | None = None


class Learned(NamedTuple):
    """A claim: a model trained with the method's memory tokens scores at most `within` less than before.

    The comparison is with the model before that training, with its full cache
    (scripts/studies/memory_tokens.py).
    """

    within: float = 0.05


class Longer(NamedTuple):
    """A claim: texts far longer than in training are likelier with the method than with the full cache.

    See scripts/studies/longer_texts.py.
    """


class Faster(NamedTuple):
    """A prefill with the method takes less time than one without."""


class Untestable(NamedTuple):
    """Why this model or these tasks cannot show it."""

    why: str


def other_bytes(ours: float, theirs: float, other: str) -> str:
    """Say what the other method keeps, in percent, if it is not about as much; else nothing.

    >>> other_bytes(24.0, 16.0, "kivi"), other_bytes(25.0, 24.9, "h2o")
    (', kivi keeps 16%', '')
    """
    unequal = max(ours, theirs) > 1.1 * min(ours, theirs)
    return f", {other} keeps {theirs:.0f}%" if unequal and other != "full" else ""


class Claim(NamedTuple):
    """A method's claim in one line, its test, and a note on how the test differs from the claim."""

    method: str
    says: str
    test: Better | Near | Learned | Longer | Faster | Untestable
    note: str = ""


_SHORT_ANSWERS = Untestable("answers here are a few tokens long, and the method acts on what is written")
_HEAVIER = Untestable(
    "what it releases lies in a second tier here, so at one budget it holds half as many bytes again as H2O"
)
_AT_THE_END = Untestable("values are merged while decoding, and answers here are a few tokens long")
_FITTED_HERE = "Its profile was fitted on these tasks (other contexts); the paper's is from a test of its own"
_FOUR_LAYERS = "Four layers, of which one copies: a direction only"
SMALL = (0.125,)

CLAIMS = (
    Claim("streamingllm", "sinks and a window keep a model fluent on texts of any length", Longer()),
    Claim("hashevict", "a third to two thirds of the cache can go with little loss", Near((0.5,))),
    Claim("pagedeviction", "more accurate than StreamingLLM at small budgets", Better("streamingllm")),
    Claim(
        "lacache",
        "more accurate than StreamingLLM with the same cache",
        Better("streamingllm"),
        "The paper's ladder has 32 layers and is tested by perplexity. " + _FOUR_LAYERS,
    ),  # fmt: skip
    Claim("lm-infinite", "a model trained on short texts goes on to far longer ones", Longer()),
    Claim("sepllm", "half of the cache can go with comparable results", Near((0.5,))),
    Claim("sepllm", "better than StreamingLLM, which keeps no separators", Better("streamingllm")),
    Claim(
        "sirllm",
        "what surprised the model is remembered better than by StreamingLLM",
        Better("streamingllm", protocol=AGNOSTIC),
    ),
    Claim("triattention", "a tenth of the cache keeps long reasoning as right as all of it", _SHORT_ANSWERS),
    Claim(
        "h2o", "heavy hitters beside recent tokens do better than recent tokens alone", Better("sink-recent")
    ),
    Claim("h2o", "a fifth of the cache answers nearly as well as all of it", Near((0.25,))),
    Claim("tova", "better than other ways of eviction, H2O among them", Better("h2o")),
    Claim("tova", "an eighth of the cache nearly suffices", Near(SMALL)),
    Claim("vatp", "values' norms beside attention improve H2O", Better("h2o")),
    Claim("a2sf", "forgetting in the sums improves H2O", Better("h2o")),
    Claim("keyformer", "half of the cache keeps the model's accuracy", Near((0.5,))),
    Claim("keyformer", "noise and temperature in the sums improve H2O", Better("h2o")),
    Claim("scissorhands", "up to five times less cache without loss", Near((0.25,))),
    Claim("alisa", "four fifths of the tokens can go with next to no loss", Near((0.25,))),
    Claim("r-kv", "a tenth of the cache keeps a reasoning model's long answers right", _SHORT_ANSWERS),
    Claim("morphkv", "more accurate than SnapKV on long responses, with less memory", _SHORT_ANSWERS),
    Claim("roco", "more robust than H2O", Better("h2o")),
    Claim("roco", "more robust than TOVA", Better("tova")),
    Claim("corm", "up to 70% less cache with negligible loss", Near((0.5,))),
    Claim("buzz", "better than H2O at equal memory", Better("h2o")),
    Claim("buzz", "better than StreamingLLM at equal memory", Better("streamingllm")),
    Claim("adore", "better than H2O at equal budgets", _HEAVIER),
    Claim("scope", "a budget of its own for what is written helps in long outputs", _SHORT_ANSWERS),
    Claim("l2compress", "half of the cache can go without loss", Near((0.5,), protocol=AGNOSTIC)),
    Claim("keydiff", "without attention better than TOVA, which needs it", Better("tova", protocol=AGNOSTIC)),
    Claim("keydiff", "a quarter of the cache less costs next to nothing", Near((0.5,), protocol=AGNOSTIC)),
    Claim("curdkv", "better than SnapKV at aggressive budgets", Better("snapkv", SMALL)),
    Claim("curdkv", "better than ChunkKV at aggressive budgets", Better("chunkkv", SMALL)),
    Claim("capkv", "consistently better than earlier methods", Better("snapkv")),
    Claim("compactor", "half of the cache suffices, whatever the question", Near((0.5,), protocol=AGNOSTIC)),
    Claim(
        "compactor", "better than SnapKV where the question is not known", Better("snapkv", protocol=AGNOSTIC)
    ),
    Claim(
        "expected-attention",
        "better than SnapKV where the question is not known",
        Better("snapkv", protocol=AGNOSTIC),
    ),
    Claim(
        "expected-attention",
        "better than TOVA where the question is not known",
        Better("tova", protocol=AGNOSTIC),
    ),
    Claim(
        "q-filters",
        "better than StreamingLLM in generation, without attention",
        Untestable("it acts here at the end of a prompt, and the claim is about what is written"),
    ),
    Claim("kvzap", "two to four times less cache with negligible loss", Near(protocol=AGNOSTIC)),
    Claim("fast-kvzip", "most of the cache can go with next to no loss", Near((0.5,), protocol=AGNOSTIC)),
    Claim("locret", "better than SirLLM at equal budgets", Better("sirllm", protocol=AGNOSTIC)),
    Claim("wg-kv", "half of the memory is saved with negligible loss", Near(protocol=AGNOSTIC)),
    Claim("dms", "half of the cache can go with next to no loss", Near(protocol=AGNOSTIC)),
    Claim("attention-gate", "half of the tokens can go, and answers stay as good", Near(protocol=AGNOSTIC)),
    Claim(
        "kv-distill",
        "a tenth of the cache answers nearly as all of it does",
        Near((0.125,), protocol=AGNOSTIC),
    ),
    Claim("gisting", "a prompt goes into a few tokens with next to no loss", Learned()),
    Claim("ccm", "a fifth of the memory answers as well as the full context", Learned()),
    Claim("ccm-merge", "memory of one size loses little of the full context", Learned()),
    Claim("loma", "a quarter of the memory answers as well as the full context", Learned()),
    Claim("homer", "a model reads texts several times as long as its positions", Longer()),
    Claim("dmc", "half of the cache is merged with next to no loss", Near(protocol=AGNOSTIC)),
    Claim("dcp", "up to 80% of the context can go with next to no loss", Near(protocol=AGNOSTIC)),
    Claim("lococo", "better than dropping what has the least attention", Better("h2o")),
    Claim("lagkv", "far better than H2O in retrieval, without attention", Better("h2o", protocol=AGNOSTIC)),
    Claim("lagkv", "half of the cache costs next to nothing", Near((0.5,), protocol=AGNOSTIC)),
    Claim(
        "snapkv", "a small part of the prompt, chosen by its end, answers as well as all of it", Near((0.25,))
    ),
    Claim("snapkv", "better than H2O at equal budgets", Better("h2o")),
    Claim("sage-kv", "better than StreamingLLM at a quarter of its memory", Better("streamingllm")),
    Claim("nacl", "half of the cache keeps 95% of the quality", Near((0.5,))),
    Claim("nacl", "better than H2O", Better("h2o")),
    Claim("kvcrush", "a quarter of the cache costs less than one percent", Near((0.25,), 0.01)),
    Claim("kvcrush", "representatives improve the selection that they are added to", Better("snapkv", SMALL)),
    Claim("compresskv", "heads that retrieve choose better than all heads do", Better("snapkv", SMALL)),
    Claim("fastkv", "prompts are read faster", Faster()),
    Claim("fastkv", "as accurate as SnapKV, though upper layers read less", Near((0.25,), other="snapkv")),
    Claim("gemfilter", "better than SnapKV in finding a needle", Better("snapkv")),
    Claim("gemfilter", "prompts are read faster", Faster()),
    Claim(
        "kvzip",
        "a quarter to a third of the cache answers any question as all of it",
        Near((0.25,), protocol=AGNOSTIC),
    ),
    Claim(
        "kvzip",
        "far better than SnapKV where the question is not known",
        Better("snapkv", (0.5, 0.25, 0.125), AGNOSTIC),
    ),
    Claim(
        "kvzip",
        "far better than PyramidKV where the question is not known",
        Better("pyramidkv", (0.5, 0.25, 0.125), AGNOSTIC),
    ),
    Claim(
        "restorekv",
        "far better than KVzip where little of the cache stays",
        Better("kvzip", (0.125,), AGNOSTIC),
    ),
    Claim("finch", "halved by its question, a context answers as it did whole", Near((0.5,))),
    Claim(
        "infinipot", "better than StreamingLLM in bounded memory", Better("streamingllm", protocol=AGNOSTIC)
    ),
    Claim("chunkkv", "whole chunks are better than single tokens, as SnapKV chooses them", Better("snapkv")),
    Claim("windowkv", "12% of the cache match all of it", Near(SMALL)),
    Claim(
        "shotkv", "whole examples are better than single tokens at aggressive ratios", Better("snapkv", SMALL)
    ),
    Claim("laq", "queries looked ahead at improve SnapKV at tight budgets", Better("snapkv", SMALL)),
    Claim(
        "citrus",
        "better than methods that do not ask with the instruction, at equal memory",
        Untestable("prompts are read at once here, and its way of reading them by chunks is what it adds"),
    ),
    Claim("lazyllm", "upper layers answer as well when they read a part of the prompt", Near()),
    Claim("lazyllm", "prompts are read faster", Faster()),
    Claim("dbudgetkv", "a quarter of the cache can go without loss, whatever the text", Near(percent=75)),
    Claim("epicache", "a quarter to a sixth of the cache answers nearly as all of it does", Near((0.25,))),
    Claim("epicache", "better than other methods in bounded memory", Better("infinipot")),
    Claim("fastgen", "half of the cache can go with next to no loss", Near(percent=50)),
    Claim("intactkv", "4 bits cost less where the first tokens keep all", Better("int4", (None,))),
    Claim(
        "ape",
        "contexts that are read apart from each other answer nearly as well as in one text",
        Untestable("contexts here are single texts, of which nothing is read apart"),
    ),
    Claim("pyramidkv", "12% of the cache match all of it", Near(SMALL)),
    Claim("pyramidkv", "better than equal layers where budgets are small", Better("snapkv", SMALL)),
    Claim("cake", "better than equal layers where budgets are small", Better("snapkv", SMALL)),
    Claim("cake", "better than PyramidKV's fixed shares", Better("pyramidkv", SMALL)),
    Claim(
        "kvcompose",
        "better than structured compression by single heads",
        Better("expected-attention", protocol=AGNOSTIC),
        "It reads the prompt twice, what it is compared with once",
    ),
    Claim("zigzagkv", "better than PyramidKV at small budgets", Better("pyramidkv", SMALL), _FOUR_LAYERS),
    Claim("dynamickv", "better than PyramidKV at extreme budgets", Better("pyramidkv", SMALL)),
    Claim("dynamickv", "better than SnapKV at extreme budgets", Better("snapkv", SMALL)),
    Claim("pyramidinfer", "more than half of the cache can go with little loss", Near((0.5,))),
    Claim(
        "evolkv",
        "searched budgets are better than equal ones",
        Better("snapkv", (0.5, 0.25, 0.125)),
        "Its budgets were searched on these tasks (other contexts)",
    ),  # fmt: skip
    Claim("prefixkv", "better than H2O at equal budgets", Better("h2o")),
    Claim("simlayerkv", "lazy layers can be cut with next to no loss", Near()),
    Claim(
        "adakv",
        "unequal heads improve SnapKV",
        Better("snapkv", (0.5, 0.25, 0.125)),
        "Layers have two KV heads here, between which little can be shared out",
    ),  # fmt: skip
    Claim("criticalkv", "counting what values write improves SnapKV", Better("snapkv", (0.5, 0.25, 0.125))),
    Claim(
        "headkv",
        "budgets by what heads retrieve are better than Ada-KV's",
        Better("adakv", SMALL),
        _FITTED_HERE,
    ),  # fmt: skip
    Claim("duoattention", "half of the heads may stream without loss", Near(protocol=AGNOSTIC)),
    Claim(
        "razorattention", "70% of the cache can go with next to no loss", Near(protocol=AGNOSTIC, percent=50)
    ),
    Claim(
        "retrieval-head",
        "few heads find facts, and all others may stream",
        Near((0.25,), protocol=AGNOSTIC),
        _FITTED_HERE,
    ),  # fmt: skip
    Claim("kv-compress", "an eighth of the cache costs next to nothing", Near(SMALL)),
    Claim(
        "leankv",
        "three to five times less cache with next to no loss",
        Near(percent=17),
        "A third of a cache of 16 bits is a sixth of one in float32",
    ),
    Claim(
        "lukv", "budgets by later use improve Expected Attention", Better("expected-attention", (0.5, 0.25))
    ),
    Claim("keepkv", "merging is better than dropping by the same scores, as H2O does", Better("h2o")),
    Claim("keepkv", "better than D2O's merge", Better("d2o")),
    Claim("d2o", "merging evicted slots is better than dropping them", Better("h2o")),
    Claim("cam", "merging values is better than dropping them", _AT_THE_END),
    Claim("zeromerge", "a twentieth of the cache answers as well as all of it", Near(SMALL)),
    Claim("zeromerge", "merging evicted slots is better than dropping them", Better("h2o")),
    Claim("ems", "better than SnapKV at small budgets", Better("snapkv", SMALL)),
    Claim("kvmerger", "merging is better than dropping, as H2O does", Better("h2o", (0.5,))),
    Claim(
        "kvmerger",
        "better than CaM's merge",
        Untestable("CaM merges nothing of a prompt, where it is H2O, with which the line above compares"),
    ),
    Claim(
        "compressive-transformer",
        "what is old is better pooled than dropped",
        Untestable("the paper's models are trained to read what is pooled, and this one is not"),
    ),
    Claim("chai", "heads that share their attention cost at most 3.2 points", Near(within=0.032)),
    Claim("kvsharer", "a quarter of the layers can share with little loss", Near()),
    Claim("minicache", "layers from the middle up can be merged with next to no loss", Near()),
    Claim("less", "a small state of what left closes a part of H2O's gap", Better("h2o")),
    Claim("palu", "half of the channels cost next to nothing", Near()),
    Claim(
        "neurocache",
        "a cache of states does better than windows of the same length alone",
        Untestable("kvjax has no method with windows alone in all layers"),
    ),
    Claim("mustafar", "half of all numbers can go without loss", Near()),
    Claim("think", "two fifths of the channels of keys can go with next to no loss", Near()),
    Claim(
        "turboquant",
        "no loss at 3.5 bits and above",
        Near(within=0.02),
        "Heads of 32 channels, where a rotation concentrates less than in the paper's of 128",
    ),  # fmt: skip
    Claim("quarot", "4 bits cost next to nothing after a rotation", Near()),
    Claim("quarot", "better than 4 bits without a rotation", Better("int4", (None,))),
    Claim("qjl", "signs of a sketch cost next to nothing", Near()),
    Claim("kivi", "2 bits cost next to nothing", Near()),
    Claim("kvquant", "3 bits cost next to nothing", Near()),
    Claim("gear", "better than KIVI with codes of as many bits", Better("kivi", (None,))),
    Claim("zipcache", "a fraction of salient tokens with more bits suffices", Near((0.25,))),
    Claim("kv-adaquant", "four bits for keys and two for values cost next to nothing", Near()),
    Claim("more-tokens-lower-precision", "more tokens of 4 bits beat fewer of 16", Better("snapkv")),
    Claim("minikv", "half of the tokens in 2 bits answer nearly as well as all", Near((0.5,))),
    Claim("mikv", "few bits for what H2O would drop keep what dropping loses", Better("h2o")),
    Claim("mikv", "a quarter of the tokens with all bits answers nearly as well as all", Near((0.25,))),
    Claim("quest", "reading the pages that matter costs next to nothing", Near((0.25,))),
    Claim(
        "quest",
        "better than H2O, which cannot come back to what it dropped",
        Better("h2o"),
        "At equal reads: Quest holds all of the cache",
    ),  # fmt: skip
    Claim("rocketkv", "what SnapKV keeps can be read in part with little loss", Near((0.5,), other="snapkv")),
    Claim("infllm", "a few blocks of the past suffice to answer", Near((0.25,))),
    Claim("sparq", "an eighth of the reads costs next to nothing", Near(SMALL)),
    Claim("loki", "a quarter of the reads by principal keys costs next to nothing", Near((0.25,))),
    Claim("double-sparsity", "a sixteenth of the reads costs next to nothing", Near(SMALL)),
    Claim("pqcache", "better than Quest with as many reads", Better("quest")),
    Claim("clusterkv", "clusters of keys are better than Quest's pages", Better("quest")),
    Claim("tokenselect", "single tokens are better than InfLLM's blocks", Better("infllm")),
    Claim("tidaldecode", "picks that persist over layers are better than Quest's", Better("quest")),
    Claim("kcache", "an eighth of the values answers nearly as well as all", Near(SMALL)),
    Claim("recycled-attention", "a reused selection is better than a window", Better("streamingllm")),
    Claim("top-theta", "values above calibrated thresholds cost next to nothing", Near((0.25,))),
    Claim("retroinfer", "clusters, read or estimated, are as accurate as all tokens", Near(SMALL)),
    Claim("reattention", "segments at positions of their own answer as well as all", Near((0.25,))),
    Claim("magicpig", "sampling is better than Quest's best pages", Better("quest")),
)
