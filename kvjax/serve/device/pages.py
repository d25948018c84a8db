"""Pages: the slots of many requests in one pool, found by page tables.

Under the full cache a prompt is read in chunks, and may start with pages of a prefix that another request has
read. A method that selects once, at the end of a prompt, leaves each KV head its own number of slots in the
request's pages. Decode steps depend on these numbers alone, so one program decodes requests of all such
methods in one batch.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.base.errors import InputError
from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import with_fitted
from kvjax.hosts.arrays import fetch
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.model import Model
from kvjax.ops.decode.page_pool import BITS, PagePool, page_rows
from kvjax.pure import bind
from kvjax.serve.device.coding import NUMBERS, PAYLOAD, codes_refusal
from kvjax.serve.device.jobs import Job, Token
from kvjax.serve.device.lists import in_front, lists_of
from kvjax.serve.device.paged_step import PagedStep, Rows, adopt, put_back, read_piece, taken
from kvjax.serve.device.reading import read_alone, size_of
from kvjax.serve.device.write import Written, draws_of, first_token, replayed, top_of, write_slice, written
from kvjax.steps import Run

PIECES = (16, 64, 256)


def refusal(model: Model) -> str:
    """Why the slots of a model cannot be stored in pages; empty if they can."""
    config = getattr(model, "config", None)
    if config is None or hasattr(model, "stepping"):
        return "the model reads and steps by itself"
    if model.on_mesh is not None:
        return "the model lies on several devices"
    mixers = [mixer_of(config, i) for i in range(config.layers)]
    plain = all(
        type(one) is Attention and not (one.takes or one.sink or one.kv_bias or one.clip) for one in mixers
    )
    if not plain or any(at is not None for at in config.inputs):
        return "layers carry states, take from each other, or see more than the sequence"
    if len({one.slots_of(config)[:3] for one in mixers}) > 1:
        return "layers differ in their KV heads"
    if any(one.rope(config, i).by_length for i, one in enumerate(mixers)):
        return "the rotation depends on the length of a text"
    return ""


def pages_refusal(model: Model, method: Method) -> str:
    """Why requests of a method cannot be stored in pages; empty if they can."""
    if why := refusal(model):
        return why
    part = dataclasses.replace(method.decode_part(), store=None)
    if method.make is not None or method.layers or method.stack is not None or part != Method().decode_part():
        return f"{method.id} has steps, slots or weights of its own"
    width = mixer_of(model.config, 0).slots_of(model.config).key
    if method.store is not None and (why := codes_refusal(method.store, width)):
        return f"{method.id}: {why}"
    keep = method.keep
    if keep is not None and (keep.merge is not None or keep.lower is not None):
        return f"{method.id} merges slots"
    whole = method == Method()
    if not whole and any(window is not None for window in model.config.windows):
        return "windowed layers evict in steps"
    run = Run(model.config, bind(method, model))
    if not whole and not all(gm.lasting for gm in run.groups(model.params)):
        return f"{method.id} changes stored slots in steps"
    return ""


def of_a_few(least: int, first: int = 4) -> int:
    """The smallest of first, 4 first, 16 first, ... that is at least `least`; so few sizes are compiled.

    >>> of_a_few(3), of_a_few(17)
    (4, 64)
    """
    while first < least:
        first *= 4
    return first


class Pages:
    """A pool of `blocks` blocks of `page` tokens, each a page of every layer and KV head.

    store: how slots are encoded; None stores them as computed.
    rows: how many rows a step has; a larger batch has four times as many. most: pages of the longest request.
    lists: slots per layer and KV head, by request. read_tokens: how many prompt tokens were computed.
    """

    def __init__(
        self, model: Model, page: int, blocks: int, rows: int, most: int, store: Store | None = None
    ):
        config = model.config
        slots = mixer_of(config, 0).slots_of(config)
        self.params, self.page, self.blocks, self.rows = (
            with_fitted(model.params, Method()),
            page,
            blocks,
            rows,
        )
        self.heads, self.step, self.most = slots.heads, PagedStep(config, store), of_a_few(most)
        sizes = [next(iter(p.values())).shape[0] for p in model.params["layers"]]
        self.layers = sum(sizes)
        dtype = model.params["norm"].dtype.name if store is None else PAYLOAD
        names = ("pos",) if store is None else ("pos", *NUMBERS)
        if page % (tokens := 32 // BITS[dtype]):
            raise InputError(
                f"a page has {page} tokens, expected a multiple of {tokens} in {dtype}: write page=16"
            )
        height = page_rows(dtype, page, slots.key, names)
        shape = self.heads * blocks, height, slots.key
        self.pools = tuple(
            PagePool(jnp.zeros((size, *shape), jnp.int32), page, dtype, names) for size in sizes
        )
        self.lists: dict[int, np.ndarray] = {}
        self.away: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        self.tables: dict[int, list[int]] = {}
        self.read_tokens = 0

    def read(self, job: Job, start: int, count: int, goal: int) -> Token | None:
        """Reads scheduled tokens of a job, and returns the next token once all are read; else None."""
        if job.method != Method():
            return self._choose(job) if start + count == goal else None
        if job.id not in self.lists:
            self.lists[job.id] = np.full((self.layers, self.heads), start, np.int32)
            job.next = start
        logits, text = None, [*job.tokens.tolist(), *job.written]
        for at in range(start, start + count, PIECES[-1]):
            logits = self._piece(job, text[at : min(at + PIECES[-1], start + count)])
        return first_token(job, logits) if logits is not None and start + count == goal else None

    def write(self, jobs: list[Job], n: int) -> Written:
        """Runs up to n steps of some jobs, each of which stores its last token."""
        return self._steps(jobs, [job.written[-1] for job in jobs], n)

    def _steps(self, jobs: list[Job], tokens: list[int], n: int) -> Written:
        where, rows = range(len(jobs)), of_a_few(len(jobs), self.rows)
        for job in jobs:
            self._check_room(job, n)
        token, active = np.zeros(rows, np.int32), np.zeros(rows, bool)
        token[: len(jobs)], active[: len(jobs)] = tokens, True
        state = self.pools, self._rows(jobs, rows)
        draws = draws_of(jobs, where, rows)
        done = write_slice(self.step, self.params, state, token, active, draws, np.int32(n), top_of(jobs))
        self.pools = done.state[0]
        found = written(done, where)
        for job in jobs:
            self.lists[job.id] += found.count
            job.next += found.count
        return found

    def _rows(self, jobs: list[Job], rows: int, most: int = 0) -> Rows:
        most = of_a_few(max([most, *(len(self.tables[job.id]) for job in jobs)]))
        blocks = np.zeros((rows, most), np.int32)
        stored, at = np.zeros((self.layers, rows, self.heads), np.int32), np.zeros(rows, np.int32)
        for i, job in enumerate(jobs):
            table = self.tables[job.id]
            blocks[i, : len(table)], stored[:, i], at[i] = table, self.lists[job.id], job.next
        return Rows(blocks, stored, at)  # type: ignore[arg-type]  # they go to the device by the call

    def _check_room(self, job: Job, n: int) -> None:
        longest, room = int(self.lists[job.id].max()), len(self.tables[job.id]) * self.page
        assert longest + n <= room, f"{n} tokens more than {longest} in a table of {room}"

    def _piece(self, job: Job, tokens: list[int]) -> Array:
        """Reads and stores a chunk of a prompt; returns the logits after it."""
        size = next(size for size in PIECES if size >= len(tokens))
        self._check_room(job, len(tokens))
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        count = np.array([len(tokens)], np.int32)
        logits, self.pools = read_piece(
            self.step, self.params, self.pools, self._rows([job], 1, self.most), padded, count
        )
        self.lists[job.id] += len(tokens)
        job.next += len(tokens)
        self.read_tokens += len(tokens)
        return logits

    def _choose(self, job: Job) -> Token:
        """Reads a whole prompt under its method, and copies the kept slots into the job's pages."""
        table = self.tables[job.id]
        logits, cache = read_alone(job, size_of(job))
        each = lists_of(cache)
        longest = max(int((pos >= 0).sum(-1).max()) for _, _, pos in each)
        most = of_a_few(max(self.most, len(table)))
        if longest > len(table) * self.page:
            raise InputError(
                f"{job.method.id} keeps {longest} slots of a prompt of {len(job.tokens)} tokens, more than "
                f"its {len(table)} pages of {self.page} hold: serve it with larger pages"
            )
        blocks = np.zeros((1, most), np.int32)
        blocks[0, : len(table)] = table
        self.lists[job.id] = np.concatenate([(pos >= 0).sum(-1) for _, _, pos in each]).astype(np.int32)
        packed = tuple(in_front(one, most * self.page) for one in each)
        room = np.array([len(table) * self.page], np.int32)
        self.pools = adopt(self.pools, blocks, room, packed, self.step.store)
        job.next = int(fetch(cache.next)[0])
        self.read_tokens += len(job.tokens)
        return replayed(job, self._steps) or first_token(job, logits)

    def drop(self, id: int) -> None:
        """Forgets a request; the ledger frees its pages."""
        self.lists.pop(id, None)
        self.away.pop(id, None)

    def leave(self, id: int) -> None:
        """Copies a request's slots to the host, because its pages will be given to others."""
        table = self.tables.pop(id)
        words = fetch(taken(self.pools, self._pages_of(table).reshape(-1)))
        each = [np.asarray(x).reshape(x.shape[0], self.heads, -1, *x.shape[2:]) for x in words]
        self.away[id] = self.lists.pop(id), [x[:, :, : len(table)] for x in each]

    def come_back(self, job: Job, table: list[int]) -> None:
        """Copies a request's slots from the host into its new pages."""
        self.lists[job.id], each = self.away.pop(job.id)
        self.tables[job.id] = list(table)
        pages = self._pages_of(table)
        same = min(len(table), each[0].shape[2])
        pages[:, same:] = self.heads * self.blocks
        wide = [np.zeros((x.shape[0], *pages.shape, *x.shape[3:]), x.dtype) for x in each]
        for x, held in zip(wide, each, strict=True):
            x[:, :, :same] = held[:, :, :same]
        words = tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in wide)
        self.pools = put_back(self.pools, pages.reshape(-1), words)

    def _pages_of(self, table: list[int]) -> np.ndarray:
        """The pages of some blocks by KV head; beyond the table an index that no page has."""
        found = np.full((self.heads, of_a_few(len(table))), self.heads * self.blocks, np.int32)
        found[:, : len(table)] = np.arange(self.heads)[:, None] * self.blocks + np.array(table)
        return found

    def holds(self) -> set[int]:
        """The requests whose slots are on the device."""
        return {*self.lists}
