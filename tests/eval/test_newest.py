"""The newest tokens stay: by every kind of method, within its budget, and as each protocol asks for it."""

from io import StringIO

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.commands.main import make_parser
from kvjax.eval.compare import compare
from kvjax.eval.report.comparison_table import PROTOCOLS as SAID
from kvjax.eval.run import plan as planning
from kvjax.eval.run.cellplan import PlannedCell, plan_cells
from kvjax.eval.run.newest import keeping_newest
from kvjax.eval.run.runner import bare_run, observe
from kvjax.eval.tasks.rows import PROTOCOLS, make_rows
from kvjax.eval.tasks.suite import make_suite
from kvjax.grammar import Method
from kvjax.grammar.refuse_keep import crowded
from kvjax.keep.budgets.profile import ByProfile
from kvjax.keep.patterns import Recent
from kvjax.pure import bind
from kvjax.state.cache import kept_positions, nbytes
from tests.methods.battery import MAIN, model
from tests.sweep import sweep

LENGTHS = np.array([len(row) for row in MAIN.first])
NEWEST = 5
# Of each: what is dropped of a prompt's end without this.
METHODS = {
    "scores": "l2compress(budget=0.5, skip_layers=0)",
    "a window": "snapkv(budget=0.5, window=2)",
    "unequal layers and heads": "kvzip(budget=0.75, page=4)",
    "steps": "tova(budget=0.5)",
    "narrower layers": "fastkv(budget=0.5, share=0.5, tsp_layer=0, window=2)",
    "layers of their own": "by_layer([keydiff(budget=0.5), l2compress(budget=0.75, skip_layers=0)])",
}
ALWAYS = ("scores", "narrower layers")
TURNED = [pytest.param(name, marks=pytest.mark.rotating) for name in METHODS if name not in ALWAYS]


def kept(method):
    """Of every layer, row and head, the positions that are held; and the bytes of the cache."""
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=0)
    lists = [
        [{*head[head >= 0].tolist()} for head in row] for layer in kept_positions(cache) for row in layer
    ]
    return lists, nbytes(cache)


@pytest.mark.parametrize("name", sweep(METHODS, "scores"))
def test_the_newest_tokens_stay_and_count_in_the_budget(name):
    method = kvjax.method(METHODS[name])
    (before, weighed), (after, weighs) = kept(method), kept(keeping_newest(method, NEWEST))
    newest = [{*range(n - NEWEST, n)} for n in LENGTHS.tolist()] * model("4/2").config.layers
    assert all(mine <= head for mine, heads in zip(newest, after, strict=True) for head in heads)
    assert not all(mine <= head for mine, heads in zip(newest, before, strict=True) for head in heads)
    total = [sum(len(head) for row in lists for head in row) for lists in (before, after)]
    assert total[0] == total[1] and weighed == weighs


@pytest.mark.rotating
@pytest.mark.parametrize("variant", ["grouped", pytest.param("kvpress", marks=pytest.mark.rotating)])
def test_a_question_stays_in_the_layer_with_fewest_slots(variant):
    """Without room for it, the last layer of the pyramid would hold two of its five tokens."""
    method = kvjax.method("pyramidkv", budget=0.5, window=2, variant=variant)
    (before, _), (after, _) = kept(method), kept(keeping_newest(method, NEWEST))
    newest = [{*range(n - NEWEST, n)} for n in LENGTHS.tolist()] * model("4/2").config.layers
    assert min(map(len, (head for heads in before for head in heads))) < NEWEST
    assert all(mine <= head for mine, heads in zip(newest, after, strict=True) for head in heads)
    assert sum(len(h) for heads in before for h in heads) == sum(len(h) for heads in after for h in heads)
    with pytest.raises(InputError, match="5 of .* must stay .* slots in the last layer"):
        kept(method.protecting(Recent(NEWEST)))


@pytest.mark.rotating
def test_heads_without_importance_hold_a_question_of_any_method():
    one, question, n = kvjax.load("recall-tiny"), 30, 120
    cells = [cell for cell in plan_cells(one, ["all"], (0.25,), "short") if cell.method.keep is not None]
    keeps = {cell.label: keeping_newest(cell.method, question).keep for cell in cells}
    assert [why for keep in keeps.values() if (why := crowded(keep, 4 * n))] == []
    profiled = {label: keep for label, keep in keeps.items() if isinstance(keep.allocate, ByProfile)}
    assert profiled.keys() >= {"headkv", "evolkv", "lukv"}
    scores = jnp.zeros((4, 1, 2, 4 * n)).at[..., -question:].set(jnp.inf)
    for keep in profiled.values():
        none = jnp.zeros((4, 1, 2)).at[0].set(1.0)
        counts = keep.allocate.counts(scores, jnp.array([n], jnp.int32), none)
        assert counts.min() >= question and counts.sum() == 4 * 2 * n


def test_tokens_that_are_read_by_themselves_hold_the_newest():
    one, method = model("4/2"), kvjax.method("gemfilter(budget=0.5, filter_layer=1, kernel=1)")
    run = bare_run(one, bind(method, one), NEWEST)
    batch = padded(one, MAIN.first, None)
    tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    prompt = observe(run, one.params, tokens, lengths, None, steps.needs_of(run, one.params))
    for row, n in zip(np.asarray(prompt.source), LENGTHS, strict=True):
        assert {*range(n - NEWEST, n)} <= {*row.tolist()} and (row >= 0).sum() == n // 2


def test_what_keeps_them_anyway_is_the_same_method():
    for text in ("full", "int8", "snapkv(budget=64)", "gisting"):
        assert keeping_newest(kvjax.method(text), NEWEST) is kvjax.method(text)


def test_a_protocol_says_how_many_stay_and_has_words_everywhere():
    one = kvjax.load("recall-tiny")
    suite = make_suite(one, ["get", "chase"], length=128, seed=0)
    found = {}
    for protocol in PROTOCOLS:
        entries = [PlannedCell("full", None, Method())]
        (batch,) = planning.batches_of(planning.ComparisonPlan(one, {0: suite}, entries, (protocol,), 2, 128))
        rows = make_rows(batch.rows, protocol, 128, 64, 4, batch.newest)
        found[protocol] = rows.newest, rows.length.tolist(), bool(rows.again.all())
    longest = max(len(row[0].question) for i in (0, 1) for row in suite.rows(i, "aware"))
    assert longest > 1 and [found[name][0] for name in PROTOCOLS] == [1, longest, 1, 1]
    # The prompts are the same, whatever stays of them.
    assert found["aware"][1:] == found["aware-unprotected"][1:] != found["agnostic"][1:]
    assert SAID.keys() == {*PROTOCOLS} and len({*SAID.values()}) == len(SAID)
    assert make_parser().parse_args(["compare", "--protocol", *PROTOCOLS]).protocol == [*PROTOCOLS]


def test_a_budget_below_the_question_is_refused_and_the_other_protocol_named(tmp_path):
    given = dict(methods=["l2compress(budget=2)"], tasks=["get"], samples=1, length=128, out=tmp_path / "run")
    with pytest.raises(InputError, match="questions of up to . tokens stay .*--protocol aware-unprotected"):
        compare(**given, protocols=("aware",))


@pytest.mark.rotating
def test_a_comparison_keeps_the_question_and_says_so(tmp_path):
    printed = StringIO()
    found = compare(
        methods=["l2compress"], budgets=[0.125], tasks=["get"], samples=2, length=128, out=tmp_path / "run",
        protocols=("aware", "aware-unprotected"), console=Console(file=printed, width=140),
    )  # fmt: skip
    assert found.metrics["protocols"] == {name: SAID[name] for name in ("aware", "aware-unprotected")}
    assert all(f"{name}: {SAID[name]}" in printed.getvalue() for name in found.metrics["protocols"])
    mine = {c.protocol: c for c in found.cells if c.method == "l2compress"}
    assert mine["aware"].kept_bytes == mine["aware-unprotected"].kept_bytes
