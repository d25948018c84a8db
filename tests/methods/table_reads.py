"""Rows of methods that read only some slots; see `table.py`."""

from __future__ import annotations

from tests.float64 import block_reads, reads, reads_by_index
from tests.float64.codes import affine
from tests.float64.codes import coded as of_codes
from tests.methods.expected import DUO_SINKS, GATES, duo_kept, duo_leaves, each_layer, snap
from tests.methods.learned import CHANNELS, KV_HEADS, made_up
from tests.methods.rows import (
    KERNEL,
    PAGE,
    THETA,
    WINDOW,
    chained,
    count,
    dense,
    everything,
    half,
    kivi_bytes,
    lserve_bytes,
    plain,
    row,
    split,
)
from tests.methods.table_stores import FLIPS

CODES = dict(parts=2, bits=2, turns=3)
SHADOW = dict(rank=3, segment=8, chunk=4, outliers=1, newest=4)
GROUPS = dict(clusters=4, turns=3, sinks=2)
BLOCKS = dict(page=4, newest=6, sinks=2, compress=2, stride=1)
DIRECTION = {"direction": (KV_HEADS, CHANNELS)}
WEIGHED = made_up("PageMeans", DIRECTION, 21)
COMPRESSED = made_up("CompressedBlocks", DIRECTION | {"place": (KV_HEADS, 2)}, 22)


def narrow_bytes(rank):
    """Count a tail of the newest 4 and one more, `rank` numbers beside every slot, and lists' directions."""
    return lambda s: (
        split(everything, 1, 4, lambda s: 4 * rank, plain)(s) + s.layers * s.b * s.k * s.h * rank * 4
    )


def first_in_bits(first, nbytes):
    """Count other slots in the first layer than in those above it."""
    return lambda s: first(s._replace(layers=1)) + nbytes(s._replace(layers=s.layers - 1)) - 4 * s.b


def copied_bytes(s):
    """Count a mark per slot, and for those in the body keys and values of 4 bits, with scales and zeros."""
    return split(everything, 1, 4, lambda s: 2 * (s.h // 2 + 4), lambda s: plain(s) + 4)(s) + 20 * (
        s.layers * s.b * s.k
    )


def product_bytes(s):
    """Count a byte for each of two parts of a key, and 4 centroids of each part."""
    return split(everything, 1, 4, lambda s: 2, plain)(s) + s.layers * s.b * s.k * 4 * s.h * 4


def cluster_bytes(s):
    """Two bytes for the cluster of a key, and 4 centroids."""
    return split(everything, 1, 4, lambda s: 2, plain)(s) + s.layers * s.b * s.k * 4 * s.h * 4


def weighed_bytes(s):
    """Beside that, a mean and a count of each of them."""
    return cluster_bytes(s) + s.layers * s.b * s.k * 4 * (s.h + 1) * 4


def estimated_bytes(s):
    """Beside a cluster of every key: 4 directions, sums of keys and of values, and counts; and a centre."""
    beside = 4 * (3 * s.h + 1) + s.h
    return split(everything, 1, 4, lambda s: 2, plain)(s) + s.layers * s.b * s.k * beside * 4


def metric_bytes(s):
    """Two bytes for the cluster of a key, 4 centroids, and the root of a metric."""
    return cluster_bytes(s) + s.layers * s.b * s.k * s.h * s.h * 4


def threshold_bytes(s):
    """Count a threshold of every query head, and a sum of values of every list."""
    return split(everything, 1, 4, lambda s: 0, plain)(s) + s.layers * s.b * (s.n + s.k * s.h) * 4


def marked_bytes(s):
    """Count a tail of the newest 4 and one more, and a mark beside every slot."""
    return split(everything, 1, 4, lambda s: 4, plain)(s) + s.layers * s.b * s.k * 5 * 4


ENDS = tuple(range(8))
EVENTS = dict(gamma=0.3, keys=2, beside=0.3, least=2, events=8, sinks=2, newest=4)


def spans_bytes(slots):
    """Two traces beside every slot, a tail of the newest 4 and one more, and 8 spans with a mean key each."""
    return lambda s: (
        split(slots, 1, 4, lambda s: 8, plain)(s) + s.layers * s.b * s.k * (5 * 8 + 8 * (4 + 4 * s.h))
    )


READS = [
    row(
        "rocketkv", split(half, 4, 0, lambda s: 2 * s.h * 4, plain),
        hyper=dict(read=0.5, window=WINDOW, kernel=KERNEL, page=4, channels=5), moves=False,
        whole=dict(read=1.0), kept=each_layer(snap()), attends=reads.rocket(count, page=4, channels=5),
    ),
    row(
        "moba", split(everything, 4, 0, lambda s: s.h * 4, plain), hyper=dict(page=4), moves=False,
        attends=block_reads.moba(count, page=4),
    ),
    row(
        "moba fitted", split(everything, 4, 0, lambda s: s.h * 4, plain), id="moba", moves=False,
        hyper=dict(page=4, fitted=WEIGHED), attends=block_reads.moba(count, page=4, arrays=WEIGHED.arrays),
    ),
    row(
        # A block has three compressed keys.
        "nsa", split(everything, 4, 6, lambda s: 3 * s.h * 4, plain), hyper=BLOCKS, moves=False,
        attends=block_reads.nsa(count, **BLOCKS),
    ),
    row(
        "nsa fitted", split(everything, 4, 6, lambda s: 3 * s.h * 4, plain), id="nsa", moves=False,
        hyper=BLOCKS | dict(fitted=COMPRESSED),
        attends=block_reads.nsa(count, **BLOCKS, arrays=COMPRESSED.arrays),
    ),
    row(
        "tokenselect", split(everything, 1, 4, lambda s: 0, plain), hyper=dict(sinks=2, newest=4),
        moves=False, attends=reads.Elected(count, newest=4, sinks=2),
    ),
    row(
        "loki", narrow_bytes(5), hyper=dict(rank=5, newest=4), moves=False,
        attends=reads.ranked(reads.principal(5), count, 4),
    ),
    row(
        "double-sparsity", narrow_bytes(5), hyper=dict(channels=5, newest=4), moves=False,
        attends=reads.ranked(reads.heavy(5), count, 4),
    ),
    row(
        "pqcache", product_bytes, hyper=dict(parts=2, code_bits=2, turns=3, newest=4), moves=False,
        attends=reads.ranked(reads.product_codes(**CODES), count, 4),
    ),
    row(
        "clusterkv", cluster_bytes, hyper=GROUPS | dict(newest=4, skip_layers=0), moves=False,
        attends=reads.ranked(reads.clusters(4, 3), count, 4, sinks=2),
    ),
    row(
        "squeezed-attention", weighed_bytes, hyper=GROUPS | dict(newest=4), moves=False,
        attends=reads.ranked(reads.weighed_clusters(4, 3), count, 4, sinks=2),
    ),
    row(
        "kcache", split(everything, 1, 4, lambda s: 0, plain), hyper=dict(newest=4), moves=False,
        attends=reads.top_values(count, 4),
    ),
    row(
        "recycled-attention", marked_bytes, hyper=dict(newest=4, stride=2), moves=False,
        attends=reads.recycled(count, newest=4, stride=2),
    ),
    row(
        "top-theta", threshold_bytes, hyper=dict(window=6, room=1, newest=4), moves=False,
        attends=reads.top_theta(count, window=6, room=1, newest=4),
    ),
    row(
        "retroinfer", estimated_bytes, hyper=GROUPS | dict(newest=4, estimate=0.25), moves=False,
        attends=reads.retroinfer(count, clusters=4, turns=3, estimate=0.25, sinks=2, newest=4),
    ),
    row(
        "infinigen", first_in_bits(dense(everything), narrow_bytes(3)), moves=False, stacks=False,
        whole=dict(alpha=1e9),
        hyper=dict(alpha=0.4, columns=0.2, window=6, newest=4, skip_layers=1),
        attends=reads_by_index.infinigen(count, alpha=0.4, columns=3, window=6, newest=4, skip=1),
    ),
    row(
        # A segment has a basis of 3 directions; each of its 2 chunks a mean and a cosine.
        "shadowkv",
        split(
            everything, 8, 4, lambda s: 3 * s.h * 4 + 2 * (s.h + 1) * 4, lambda s: 3 * 4 + s.h * 4 + 4
        ),
        hyper=SHADOW, moves=False, whole=dict(rank=16),
        attends=reads_by_index.shadowkv(count, theta=THETA, **SHADOW),
    ),
    row(
        # Keys of 4 bits, with a float16 scale and zero.
        "hcattention", split(everything, 1, 4, lambda s: 0, lambda s: s.h // 2 + 4 + s.h * 4 + 4),
        hyper=dict(mass=0.6, bits=4, group=16, newest=4), moves=False, error=FLIPS,
        whole=dict(mass=1.0, newest=32),
        attends=reads_by_index.hcattention(count, mass=0.6, newest=4, code=affine(4, 16)),
    ),
    row(
        "tailorkv", first_in_bits(kivi_bytes(4, group=8, residual=4), narrow_bytes(5)), moves=False,
        stacks=False, hyper=dict(bits=4, group=8, channels=5, window=6, newest=4), whole=dict(quantised=0),
        attends=reads_by_index.tailorkv(
            count, quantised=1, channels=5, window=6, newest=4,
            coded=of_codes(affine(4, 8, channel=True), affine(4, 8), granule=8, residual=4),
        ), error=FLIPS,
    ),
    row(
        "specache", copied_bytes, hyper=dict(bits=4, group=16, newest=4), moves=False, error=FLIPS,
        attends=reads_by_index.specache(count, code=affine(4, 16), newest=4),
    ),
    row(
        "retrievalattention", metric_bytes, hyper=GROUPS | dict(newest=4, window=6, scan=0.5), moves=False,
        whole=dict(scan=1.0),
        attends=reads_by_index.retrievalattention(
            count, scan=0.5, clusters=4, turns=3, window=6, sinks=2, newest=4
        ),
    ),
    row(
        "a2ats", metric_bytes, hyper=GROUPS | dict(newest=4, window=6), moves=False, whole=dict(newest=32),
        attends=reads_by_index.a2ats(count, clusters=4, turns=3, window=6, sinks=2, newest=4, theta=THETA),
    ),
    row(
        "em-llm", spans_bytes(everything), hyper=EVENTS, moves=False,
        attends=reads_by_index.Recalled(count, **EVENTS),
    ),
    row(
        "sentencekv", spans_bytes(half),
        hyper=dict(read=0.5, window=WINDOW, kernel=KERNEL, separators=ENDS, sentences=8, sinks=2, newest=4),
        moves=False, whole=dict(read=1.0), kept=each_layer(snap()),
        attends=reads_by_index.sentencekv(count, separators=ENDS, sinks=2, newest=4),
    ),
    row(
        "reattention", split(everything, 4, 6, lambda s: 0, plain), hyper=dict(page=4, newest=6, sinks=2),
        moves=False, attends=reads.reattention(count, page=4, newest=6, sinks=2, theta=THETA),
    ),
    row(
        # All 16 channels say what a page could have.
        "arkvale", split(everything, 4, 0, lambda s: 2 * s.h * 4, plain), moves=False,
        hyper=dict(page=4, skip_layers=0), attends=reads.rocket(count, page=4, channels=16),
    ),
    chained(
        # Pages of 4 bits are read in part: no slots describe the logits, and nothing leaves them exact.
        "lserve", lserve_bytes,
        (
            "lserve",
            dict(budget=0.5, fitted=GATES, sinks=DUO_SINKS, window=WINDOW, page=PAGE, part=2, group=8),
        ),
        kept=duo_kept, victim=duo_leaves, counted=True, error=None, moves=False,
    ),
]  # fmt: skip
