"""The ledger and the tree: after random legal steps every page is where the books say it is."""

import random

import pytest

from kvjax.serve.holding import Holding
from kvjax.serve.ledger.audit import audit
from kvjax.serve.ledger.blocks import Ledger
from kvjax.serve.ledger.tree import PrefixTree
from kvjax.serve.requests import Request


class Adversary:
    """Takes random legal steps, and keeps its own books: what every sequence and the tree should hold."""

    def __init__(self, seed, pages=24):
        self.random, self.ledger = random.Random(seed), Ledger(pages)
        self.tree, self.keys, self.next = PrefixTree(self.ledger), {}, 0

    def step(self):
        self.random.choice([self.start, self.grow, self.fork, self.write, self.trim, self.end, self.evict])()

    def owner(self):
        return self.random.choice(list(self.ledger.tables)) if self.ledger.tables else None

    def start(self):
        keys = [self.random.randrange(2) for _ in range(self.random.randrange(1, 6))]
        # Sometimes the tree is not asked: two read one prefix at the same time.
        hit = self.tree.match(keys) if self.random.random() < 0.7 else []
        need = len(keys) - len(hit)
        if self.ledger.free < need:
            return
        owner, self.next = self.next, self.next + 1
        self.ledger.share(owner, hit)
        self.ledger.take(owner, need)
        self.tree.use(keys)
        self.tree.insert(keys, owner)
        self.keys[owner] = keys

    def grow(self):
        if (owner := self.owner()) is not None and self.ledger.free:
            self.ledger.take(owner, 1)

    def fork(self):
        if (owner := self.owner()) is not None:
            self.ledger.fork(owner, self.next)
            self.keys[self.next] = self.keys[owner]
            self.next += 1

    def write(self):
        if (owner := self.owner()) is not None and self.ledger.free and self.ledger.tables[owner]:
            at = len(self.ledger.tables[owner]) - 1
            if at >= len(self.keys[owner]):
                before = self.ledger.counts[self.ledger.tables[owner][at]]
                copied = self.ledger.write(owner, at)
                assert (copied is not None) == (before > 1)
                assert self.ledger.counts[self.ledger.tables[owner][at]] == 1

    def trim(self):
        if (owner := self.owner()) is not None:
            least = len(self.keys[owner])
            self.ledger.trim(owner, self.random.randint(least, max(least, len(self.ledger.tables[owner]))))

    def end(self):
        if (owner := self.owner()) is not None:
            gives = self.ledger.gives(owner)
            before = self.ledger.free + self.ledger.idle
            self.ledger.release(owner)
            self.tree.released(self.keys.pop(owner))
            assert self.ledger.free + self.ledger.idle == before + gives

    def evict(self):
        wanted, idle = self.random.randrange(1, 4), self.ledger.idle
        assert self.tree.evict(wanted) == min(wanted, idle)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.rotating) for n in range(1, 5))])
def test_random_steps_leave_a_clean_audit_and_lose_no_page(seed):
    """Ten thousand steps with all five seeds."""
    adversary = Adversary(seed, pages=16)
    for _ in range(2000):
        adversary.step()
        assert audit(adversary.ledger, adversary.tree) == []
    while adversary.ledger.tables:
        adversary.end()
    adversary.tree.evict(adversary.ledger.pages)
    assert adversary.ledger.free == adversary.ledger.pages


@pytest.mark.parametrize(
    "fault, said",
    [
        (lambda one: one.ledger._free.pop(), "is lost"),
        (lambda one: one.ledger._free.append(one.ledger._free[0]), "times in the free list"),
        (lambda one: one.ledger._free.append(one.ledger.tables[0][0]), "is free and held"),
        (lambda one: one.ledger.tables[0].pop(), "holders, and its count says"),
        (lambda one: one.ledger.tables[1].append(one.ledger.tables[0][0]), "holders, and its count says"),
        (lambda one: one.ledger.share(0, [one.ledger.tables[0][0]]), "holds page"),
        (lambda one: one.tree.root.children.clear(), "times in the tree"),
        (lambda one: setattr(one.ledger, "idle", 1), "could be evicted"),
    ],
)
def test_a_planted_fault_is_found(fault, said):
    one = Adversary(0)
    for keys in ([0, 1], [1]):
        draws = iter([len(keys), *keys])
        one.random.randrange = lambda *_, draws=draws: next(draws)
        one.random.random = lambda: 0.0
        one.start()
    assert audit(one.ledger, one.tree) == []
    fault(one)
    assert any(said in line for line in audit(one.ledger, one.tree)), audit(one.ledger, one.tree)


def test_the_prefix_that_was_used_longest_ago_leaves_first():
    ledger = Ledger(4)
    tree = PrefixTree(ledger)
    for owner, keys in enumerate(["ab", "ac", "d"]):
        hit = tree.match(keys)
        ledger.share(owner, hit)
        ledger.take(owner, len(keys) - len(hit))
        tree.insert(keys, owner)
    for owner, keys in enumerate(["ab", "ac", "d"]):
        ledger.release(owner)
        tree.released(keys)
    tree.use("ab")
    assert tree.evict(1) == 1 and not tree.match("ac")[1:] and len(tree.match("ab")) == 2
    assert tree.evict(1) == 1 and tree.match("d") == [] and len(tree.match("ab")) == 2
    assert tree.evict(9) == 2 and ledger.free == 4


def test_a_prefix_that_two_have_read_at_once_is_held_once():
    ledger = Ledger(6)
    tree = PrefixTree(ledger)
    for owner in range(2):
        ledger.take(owner, 2)
    for owner, keys in enumerate(["ab", "ac"]):
        tree.insert(keys, owner)
    assert ledger.tables[0][0] == ledger.tables[1][0] and ledger.free == 3
    ledger.release(0)
    tree.released("ab")
    assert audit(ledger, tree) == [] and ledger.idle == tree.evict(9) == 1
    ledger.replace(1, 0, *ledger.take(2, 1))
    assert any("without page" in line for line in audit(ledger, tree))


def test_four_samples_of_a_prompt_hold_less_than_a_third_more_than_one():
    ledger, page, prompt, output = Ledger(200), 16, 1000, 64
    ledger.take(0, -(-prompt // page))
    for child in (1, 2, 3):
        ledger.fork(0, child)
    for owner in range(4):
        ledger.write(owner, prompt // page)
        ledger.take(owner, -(-(prompt + output) // page) - len(ledger.tables[owner]))
    one = -(-(prompt + output) // page)
    assert audit(ledger) == [] and ledger.pages - ledger.free < 1.3 * one


def test_a_page_larger_than_a_span_has_the_keys_of_several():
    request = Request(0, 0.0, 10, 1, keys=("a", "b", "c"), span=4)
    assert request.page_keys(8) == [(0, "a", "b")] and request.page_keys(4) == [(0, "a"), (0, "b")]
    assert len(request.page_keys(2)) == 5


def test_pages_have_equal_keys_where_all_their_tokens_are_equal_whatever_the_span():
    """Against tokens written out one by one, which a key stands for."""
    for span in range(1, 8):
        for page in range(1, 8):
            one, other = (
                Request(0, 0.0, 20, 1, tuple(("x", "y", end)[: -(-20 // span)][:3]), span) for end in "ab"
            )
            tokens = [[(key, i) for key in r.keys for i in range(span)][:20] for r in (one, other)]
            for i, (a, b) in enumerate(zip(one.page_keys(page), other.page_keys(page), strict=True)):
                same = tokens[0][i * page : (i + 1) * page] == tokens[1][i * page : (i + 1) * page]
                assert (a == b) == same and len(tokens[0]) >= (i + 1) * page


def test_too_few_pages_are_an_error_that_says_how_many():
    with pytest.raises(MemoryError, match="3 pages were asked for, 2 of 2 are free"):
        Ledger(2).take(0, 3)


@pytest.mark.parametrize("residual, granule", [(0, 1), (0, 4), (6, 1), (6, 4), (16, 8)])
@pytest.mark.parametrize("page, plain", [(8, 3), (16, 4), (24, 16)])
def test_pages_hold_the_uncoded_tokens_and_the_coded_ones(page, plain, residual, granule):
    """Counted token by token: the newest `residual` stay uncoded, others leave `granule` at a time."""
    holding, uncoded, coded, most = Holding(page, plain, residual, granule), 0, 0, {}
    ring = -(-(residual + granule) // plain)
    for tokens in range(1, 200):
        uncoded += 1
        need = min(-(-tokens // plain), ring) + -(-coded // page)
        if uncoded == residual + granule:
            uncoded, coded = uncoded - granule, coded + granule
            need = ring + -(-coded // page)
        assert (holding.coded(tokens), holding.pages(tokens)) == (coded, need)
        most[need] = tokens
    for pages in sorted(most)[:-1]:
        assert holding.tokens(pages) == most[pages]
    assert [Holding(page).tokens(n) for n in (1, 3)] == [page, 3 * page] and Holding(page).pages(
        page + 1
    ) == 2
