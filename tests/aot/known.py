"""The compiled decode steps of all layout classes, and the known ones that copy a layer's keys."""

from importlib.metadata import PackageNotFoundError, version

from tests.aot import record

VERSIONS, ROWS = record.read("layouts")
ROWS = {(case.removeprefix("layout-"), target): row for (case, target), row in ROWS.items()}
COMPILERS = {"cpu": "jaxlib", "v5e:2x2": "libtpu", "h100": "jax-cuda13-plugin"}
TURNED = "keys that lie unrotated are turned whenever they are read, which makes a layer of them"
IN_TURNS = "a phase that hides slots reads a layer's keys in turns, and turns them each time"
MERGED = "a merge makes all slots of a layer anew, to be written behind what the merge still reads"
ORDERED = "where rows are due, a layer's slots are put into the order of their tokens to be judged"
DECODED = "codes without a kernel are taken out of their stack to be decoded, a layer at a time"
OVER = "a layer is decoded over the one below it, whose numbers are made as well, and its keys are turned"
TAKEN = "a layer is taken out of its stack for the slot of each list that leaves it"
RELAID = "hash codes are read with their slots on the lanes, and laid out anew where new ones are flushed"
PADDED = "slots with fewer components are filled up with zeros whenever they are read"
GATHERED = (
    "pages of codes are put into the order of their lists to be decoded, which XLA fuses in a step alone"
)
IN_STEPS = dict.fromkeys(("streamingllm", "lm-infinite", "lacache"), TURNED)
POOLED = dict.fromkeys(("compressive-transformer", "freqkv"), MERGED)
AT_PREFILL = dict.fromkeys(("snapkv-renumbered", "finch", "adakv-renumbered"), TURNED)
KNOWN = {
    "cpu": IN_STEPS | AT_PREFILL | {
        "ape": IN_TURNS, "kvquant": TURNED, "cq": TURNED, "skvq": TURNED, "aqua-kv": OVER, "keepkv": MERGED,
        "zdc": PADDED,
    } | POOLED,
    "v5e:2x2": {
        "ape": IN_TURNS, "kvquant": TURNED, "cq": TURNED, "aqua-kv": OVER, "keepkv": MERGED, "r-kv": ORDERED,
        "less": TAKEN, "qserve": DECODED, "skvq": DECODED, "oscar": DECODED,
        "int4": DECODED, "intactkv": DECODED, "prefixquant": DECODED, "think": DECODED, "mikv": DECODED,
        "zipcache": DECODED, "adakv-int4": DECODED, "magicpig": RELAID, "zdc": PADDED,
        "hcattention": DECODED, "shadowkv": DECODED,
    } | POOLED,
    "h100": {"kvquant": TURNED, "aqua-kv": OVER, "zdc": PADDED} | POOLED,
}  # fmt: skip
# A loop of steps on CPUs.
LOOPS = KNOWN["cpu"] | {"leankv": GATHERED}


def assert_in_place(target, name, found):
    """Check that a step updates its cache in place; only known cases copy as much as a layer's keys."""
    # A TPU's memory holds small arrays in whole tiles.
    most = 1.01 * found["cache"] if target.startswith("v") else found["cache"]
    assert found["cache"] <= found["aliases"] <= most
    assert (found["moved"] >= found["leaf"]) == (name in KNOWN[target]), found


def assert_as_recorded(target, name, found):
    """With the compiler of the record: no more memory than recorded, and copies only as large as recorded."""
    row = ROWS[name, target]
    if compiler(target) != VERSIONS[COMPILERS[target]]:
        return
    assert found["temporaries"] <= 1.05 * row["temporaries"] + 2**20
    if name in KNOWN[target]:
        assert abs(found["moved"] - row["moved"]) <= 0.01 * row["moved"]


def compiler(target):
    try:
        return version(COMPILERS[target])
    except PackageNotFoundError:
        return ""
