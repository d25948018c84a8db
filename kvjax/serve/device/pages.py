"""Pages: the slots of many requests in one arena, found by page tables.

Under the full cache a prompt is read in chunks, and may start with pages of a prefix that another request has
read. A method that selects once, at the end of a prompt, leaves each KV head its own number of slots in the
request's pages. Decode steps depend on these numbers alone, so one program decodes requests of all such
methods in one batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from kvjax.base.errors import InputError
from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import with_fitted
from kvjax.hosts.arrays import fetch
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.model import Model
from kvjax.ops.decode.page_pool import PagePool
from kvjax.pure import bind
from kvjax.serve.device.arena import Arena, PageFormat, shape_of
from kvjax.serve.device.code_step import CodePool, adopt_codes
from kvjax.serve.device.coding import codes_refusal
from kvjax.serve.device.jobs import GeneratedToken, Job
from kvjax.serve.device.lists import code_lists_of, in_front, lists_of
from kvjax.serve.device.paged_step import (
    Nodes,
    PagedStep,
    RowPages,
    TokensToCompute,
    adopt,
    mixed,
    put_back,
    read_piece,
    taken,
)
from kvjax.serve.device.reading import read_alone, size_of
from kvjax.serve.device.slice_step import gathered_slice, gathers
from kvjax.serve.device.write import (
    WrittenTokens,
    draws_of,
    first_token,
    replayed,
    top_of,
    write_slice,
    written,
)
from kvjax.serve.ledger.nodes import pieces
from kvjax.serve.loop.programs import beside_a_step, of_a_few
from kvjax.state.cache import Cache
from kvjax.steps import Run

# The numbers of tokens of a prompt that a program reads at once.
PIECES = 16, 64, 256


def refusal(model: Model) -> str:
    """Why the slots of a model cannot be stored in pages; empty if they can."""
    config = getattr(model, "config", None)
    if config is None or hasattr(model, "stepping"):
        return "the model reads and steps by itself"
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
    on, heads = model.on_mesh, mixers[0].slots_of(config).heads
    if on is not None and any(on.devices(axis) > 1 for axis in ("batch", "tokens", "layers")):
        return f"the mesh splits rows, tokens or layers ({on.rules}), expected weights and heads alone"
    if on is not None and heads % on.devices("kv_heads"):
        return f"{heads} KV heads do not divide over {on.over('kv_heads')}"
    return ""


def pages_refusal(model: Model, method: Method, page: int = 16) -> str:
    """Why requests of a method cannot be stored in pages of `page` uncoded tokens; empty if they can."""
    if why := refusal(model):
        return why
    part = dataclasses.replace(method.decode_part(), store=None)
    if method.make is not None or method.layers or method.stack is not None or part != Method().decode_part():
        return f"{method.id} has steps, slots or weights of its own"
    store = method.store
    if store is not None and (why := codes_refusal(store, model.config.layers)):
        return f"{method.id}: {why}"
    if store is not None and (why := PageFormat(shape_of(model, page), store).why):
        return f"{method.id}: {why}"
    keep = method.keep
    if keep is not None and (keep.merge is not None or keep.lower is not None):
        return f"{method.id} merges slots"
    whole = method == Method()
    if not whole and any(window is not None for window in model.config.windows):
        return "windowed layers evict in steps"
    apart = store is not None and (store.residual > 0 or store.granule > 1)
    if apart and method.reread is not None:
        return f"{method.id} reads prompts twice, and encodes several tokens together"
    # Codes of several tokens change the newest slots in steps, and the engine does what they do.
    bare = dataclasses.replace(method, store=None) if apart else method
    run = Run(model.config, bind(bare, model))
    if not whole and not all(gm.lasting for gm in run.groups(model.params)):
        return f"{method.id} changes stored slots in steps"
    return ""


def _size_of(tokens: int) -> int:
    """Find the smallest size of a piece that holds so many tokens."""
    return next(size for size in PIECES if size >= tokens)


def _packed(part: TokensToCompute) -> TokensToCompute:
    """Pack the tokens of all prompts of a part side by side, so that little padding is computed."""
    (prompts, size), counts = part.tokens.shape, np.asarray(part.counts)
    if prompts == 1:
        return part
    real = np.arange(size) < counts[:, None]
    # Where a piece has a place left over, a token that does not count is computed.
    flat = np.full(_size_of(int(counts.sum())), real.argmin(), np.int32)
    flat[: counts.sum()] = np.flatnonzero(real)
    first = np.cumsum([0, *counts[:-1]]).astype(np.int32)
    return part._replace(flat=flat, first=first)  # type: ignore[arg-type]


class RequestPages:
    """Requests in pages of an arena whose slots are encoded alike.

    rows: how many rows a step has; a larger batch has four times as many. most: pages of the longest request.
    store: how slots are encoded; None stores them as computed. by_node: pages of a piece, if pages that rows
    share are read once; 0: every row reads its own. lists: slots per layer and KV head, by
    request. read_tokens: how many prompt tokens were computed.
    """

    def __init__(
        self, model: Model, arena: Arena, rows: int, most: int, store: Store | None = None, by_node: int = 0
    ):
        self.arena, self.kind = arena, PageFormat(arena.shape, store)
        assert not self.kind.why, self.kind.why
        self.params, self.rows = with_fitted(model.params, Method()), rows
        self.heads, self.blocks, self.layers = arena.shape.heads, arena.blocks, arena.layers
        self.step = PagedStep(model.config, store, on_mesh=model.on_mesh)
        # Codes with an uncoded ring have their pages for themselves.
        self.by_node = 0 if self.kind.plain is not None else by_node
        # A table has at least one page beside those of uncoded tokens.
        self.most = of_a_few(max(most, self.kind.holding.first + 1))
        self.lists: dict[int, np.ndarray] = {}
        self.away: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        self.tables: dict[int, list[int]] = {}
        self.read_tokens = 0

    @property
    def pools(self) -> tuple[PagePool | CodePool, ...]:
        """The arena's words as pages of this kind, for each group of layers."""
        return tuple(map(self.kind.of, self.arena.words))

    @pools.setter
    def pools(self, new: tuple[PagePool | CodePool, ...]) -> None:
        self.arena.words = tuple(pool.words for pool in new)

    def read(self, job: Job, start: int, count: int, goal: int) -> GeneratedToken | None:
        """Read scheduled tokens of a job, and return the next token once all are read; else None."""
        if job.method != Method():
            return self._choose(job) if start + count == goal else None
        logits = self._piece(job, self._all_but_the_last(job, start, count))
        return first_token(job, logits) if start + count == goal else None

    def read_and_write(
        self, parts: Sequence[tuple[Job, int, int, int]], jobs: list[Job]
    ) -> tuple[list[GeneratedToken | None], WrittenTokens]:
        """Run a step of some jobs together with parts of prompts (job, start, count, goal) of the full cache.

        The last pieces of prompts, as many as fit, and the step are one program and one flat batch.
        """
        tokens: list[GeneratedToken | None] = [None] * len(parts)
        lasts = [self._all_but_the_last(*part[:3]) for part in parts]
        here = beside_a_step([*map(len, lasts)], PIECES[-1])
        for i, (job, start, count, goal) in enumerate(parts):
            if i not in here:
                logits = self._piece(job, lasts[i])
                tokens[i] = first_token(job, logits) if start + count == goal else None
        found = self._mixed(jobs, [parts[i][0] for i in here], [lasts[i] for i in here])
        for n, i in enumerate(here):
            _, start, count, goal = parts[i]
            tokens[i] = next(found.of(len(jobs) + n)) if start + count == goal else None
        return tokens, found

    def _mixed(self, jobs: list[Job], readers: list[Job], lasts: list[list[int]]) -> WrittenTokens:
        rows, prompts = of_a_few(len(jobs), self.rows, 4), of_a_few(len(readers), 1)
        everyone, where = [*jobs, *readers], [*range(len(jobs)), *(rows + i for i in range(len(readers)))]
        for job in jobs:
            self._check_room(job, 1)
        step = self._part(jobs, [job.written[-1:] for job in jobs], rows, 1)
        step = step._replace(rows=step.rows._replace(nodes=self._nodes(jobs)))
        pieces = _packed(self._part(readers, lasts, prompts, _size_of(max(map(len, lasts)))))
        draws, top = draws_of(everyone, where, rows + prompts), top_of(everyone)
        done, self.pools = mixed(self.step, self.params, self.pools, step, pieces, draws, top)
        for job, new in zip(everyone, [*([0] for _ in jobs), *lasts], strict=True):
            self._count(job, len(new))
        self.read_tokens += sum(map(len, lasts))
        return WrittenTokens(1, *(np.asarray(x)[where][:, None] for x in fetch(done)))

    def _part(self, jobs: list[Job], tokens: list[list[int]], rows: int, size: int) -> TokensToCompute:
        """Build the operand of a program with the tokens of job i in row i, padded to [rows, size]."""
        padded, counts = np.zeros((rows, size), np.int32), np.zeros(rows, np.int32)
        for i, one in enumerate(tokens):
            padded[i, : len(one)], counts[i] = one, len(one)
        return TokensToCompute(self._rows(jobs, rows, self.most), padded, counts)  # type: ignore[arg-type]

    def _all_but_the_last(self, job: Job, start: int, count: int) -> list[int]:
        """Read a part of a prompt piece by piece; return the tokens of its last piece."""
        if job.id not in self.lists:
            self.lists[job.id] = np.full((self.layers, self.heads), start, np.int32)
            job.next = start
        text, end = [*job.tokens.tolist(), *job.written], start + count
        while end - start > PIECES[-1]:
            self._piece(job, text[start : start + PIECES[-1]])
            start += PIECES[-1]
        return text[start:end]

    def _count(self, job: Job, tokens: int) -> None:
        """Record that so many tokens of a job are stored."""
        self.lists[job.id] += tokens
        job.next += tokens

    def write(self, jobs: list[Job], n: int) -> WrittenTokens:
        """Run up to n steps of some jobs, each of which stores its last token."""
        return self._steps(jobs, [job.written[-1] for job in jobs], n)

    def _steps(self, jobs: list[Job], tokens: list[int], n: int) -> WrittenTokens:
        where, rows = range(len(jobs)), of_a_few(len(jobs), self.rows, 4)
        for job in jobs:
            self._check_room(job, n)
        token, active = np.zeros(rows, np.int32), np.zeros(rows, bool)
        token[: len(jobs)], active[: len(jobs)] = tokens, True
        pools, given = self.pools, self._rows(jobs, rows)._replace(nodes=self._nodes(jobs))
        last = token, active, draws_of(jobs, where, rows), np.int32(n), top_of(jobs)
        if gathers(self.step, pools, given):
            done = gathered_slice(self.step, self.params, pools, given, *last)
            self.pools = done.state
        else:
            done = write_slice(self.step, self.params, (pools, given), *last)
            self.pools = done.state[0]
        found = written(done, where)
        for job in jobs:
            self._count(job, found.count)
        return found

    def _rows(self, jobs: list[Job], rows: int, most: int = 0) -> RowPages:
        least = max(most, self.kind.holding.first + 1)
        most = of_a_few(max([least, *(len(self.tables[job.id]) for job in jobs)]))
        blocks = np.zeros((rows, most), np.int32)
        stored, at = np.zeros((self.layers, rows, self.heads), np.int32), np.zeros(rows, np.int32)
        for i, job in enumerate(jobs):
            table = self.tables[job.id]
            blocks[i, : len(table)], stored[:, i], at[i] = table, self.lists[job.id], job.next
        return RowPages(blocks, stored, at)  # type: ignore[arg-type]  # they go to the device by the call

    def _nodes(self, jobs: list[Job]) -> Nodes | None:
        if not self.by_node:
            return None
        found, page = pieces([self.tables[job.id] for job in jobs], self.by_node), self.kind.holding.page
        count = of_a_few(len(found), 16, 4)
        blocks = np.zeros((count, self.by_node), np.int32)
        rows = np.full((count, of_a_few(max(len(one.rows) for one in found), times=4)), -1, np.int32)
        first, size = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for i, one in enumerate(found):
            blocks[i, : len(one.pages)], rows[i, : len(one.rows)] = one.pages, one.rows
            first[i], size[i] = one.first * page, len(one.pages) * page
        return Nodes(blocks, rows, first, size)  # type: ignore[arg-type]  # to the device by the call

    def _check_room(self, job: Job, n: int) -> None:
        longest, room = int(self.lists[job.id].max()), self.kind.holding.tokens(len(self.tables[job.id]))
        assert longest + n <= room, f"{n} tokens more than {longest} in a table of {room}"

    def _piece(self, job: Job, tokens: list[int]) -> Array:
        """Read and store a chunk of a prompt; return the logits after it."""
        self._check_room(job, len(tokens))
        piece = self._part([job], [tokens], 1, _size_of(len(tokens)))
        logits, self.pools = read_piece(self.step, self.params, self.pools, piece)
        self._count(job, len(tokens))
        self.read_tokens += len(tokens)
        return logits

    def _choose(self, job: Job) -> GeneratedToken:
        """Read a whole prompt under its method, and copy the kept slots into the job's pages."""
        logits, cache = read_alone(job, size_of(job))
        if self.kind.coded is None:
            self._adopt(job, cache)
        else:
            self._adopt_codes(job, cache)
        job.next = int(fetch(cache.next)[0])
        self.read_tokens += len(job.tokens)
        return replayed(job, self._steps) or first_token(job, logits)

    def _check_kept(self, job: Job, longest: int) -> None:
        table, room = self.tables[job.id], self.kind.holding.tokens(len(self.tables[job.id]))
        if longest > room:
            raise InputError(
                f"{job.method.id} keeps {longest} slots of a prompt of {len(job.tokens)} tokens, more than "
                f"its {len(table)} pages of {self.kind.holding.page} hold: serve it with larger pages"
            )

    def _adopt(self, job: Job, cache: Cache) -> None:
        table, page = self.tables[job.id], self.kind.holding.page
        each = lists_of(cache)
        self._check_kept(job, max(int((pos >= 0).sum(-1).max()) for _, _, pos in each))
        blocks, most = self._blocks(job)
        self.lists[job.id] = np.concatenate([(pos >= 0).sum(-1) for _, _, pos in each]).astype(np.int32)
        packed = tuple(in_front(one, most * page) for one in each)
        room = np.array([len(table) * page], np.int32)
        self.pools = adopt(self.pools, blocks, room, packed, self.step.store)

    def _adopt_codes(self, job: Job, cache: Cache) -> None:
        blocks, most = self._blocks(job)
        assert self.kind.coded is not None
        pools = tuple(pool for pool in self.pools if isinstance(pool, CodePool))
        each = code_lists_of(cache, pools, most * self.kind.coded.granules)
        self.lists[job.id] = np.concatenate([one.stored for one in each]).astype(np.int32)
        self._check_kept(job, int(self.lists[job.id].max()))
        heads = np.arange(self.heads, dtype=np.int32)[:, None] * self.blocks
        words, counts, tails, stored = zip(*each, strict=True)
        self.pools = adopt_codes(self.pools, heads + blocks, words, counts, stored, tails)

    def _blocks(self, job: Job) -> tuple[np.ndarray, int]:
        """Return the blocks of a job as a table [1, M], and M."""
        table = self.tables[job.id]
        most = of_a_few(max(self.most, len(table)))
        blocks = np.zeros((1, most), np.int32)
        blocks[0, : len(table)] = table
        return blocks, most

    def drop(self, id: int) -> None:
        """Forget a request; the ledger frees its pages."""
        self.lists.pop(id, None)
        self.away.pop(id, None)

    def leave(self, id: int) -> None:
        """Copy a request's slots to the host, because its pages will be given to others."""
        table = self.tables.pop(id)
        words = fetch(taken(self.arena.words, self._pages_of(table).reshape(-1)))
        each = [np.asarray(x).reshape(x.shape[0], self.heads, -1, *x.shape[2:]) for x in words]
        self.away[id] = self.lists.pop(id), [x[:, :, : len(table)] for x in each]

    def come_back(self, job: Job, table: list[int]) -> None:
        """Copy a request's slots from the host into its new pages."""
        self.lists[job.id], each = self.away.pop(job.id)
        self.tables[job.id] = list(table)
        pages = self._pages_of(table)
        same = min(len(table), each[0].shape[2])
        pages[:, same:] = self.heads * self.blocks
        wide = [np.zeros((x.shape[0], *pages.shape, *x.shape[3:]), x.dtype) for x in each]
        for x, held in zip(wide, each, strict=True):
            x[:, :, :same] = held[:, :, :same]
        words = tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in wide)
        self.arena.words = put_back(self.arena.words, pages.reshape(-1), words)

    def _pages_of(self, table: list[int]) -> np.ndarray:
        """Find the pages of some blocks by KV head; beyond the table an index that no page has."""
        found = np.full((self.heads, of_a_few(len(table), times=4)), self.heads * self.blocks, np.int32)
        found[:, : len(table)] = np.arange(self.heads)[:, None] * self.blocks + np.array(table)
        return found

    def holds(self) -> set[int]:
        """Return the requests whose slots are on the device."""
        return {*self.lists}
