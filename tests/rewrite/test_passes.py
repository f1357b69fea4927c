"""Each pass on the smallest graphs that show what it does."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.ir.plan import Ahead
from autopar.own_operators import CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_BACKWARD_
from autopar.rewrite.inplace import ComputeIntoDead, ReduceIntoDead
from autopar.rewrite.marks import C10D, WAIT, Mark, Role
from autopar.rewrite.passes import run_passes
from autopar.rewrite.schedule import IssueAhead, IssueEarly, PrefetchGathers, SettleScatters, SinkWaits
from autopar.rewrite.simplify import DropIdentities, MergeEqualViews, ViewWhatCanBeViewed

ATEN = torch.ops.aten


class Draft:
    """A graph written node by node, each with its value and mark."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def start(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def op(self, target, *args, role: Role = "operator", name: str | None = None, parameter: bool = False) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        moved = {C10D.all_reduce.default, WAIT}
        gather = target is C10D.all_gather_into_tensor.default
        value = torch.cat([values[0]] * 2) if gather else values[0].clone() if target in moved else target(*values)
        node.meta.update(val=value, autopar=Mark(node.name, "forward", role, "", parameter))
        return node

    def gather(self, value: fx.Node) -> tuple[fx.Node, fx.Node]:
        started = self.op(C10D.all_gather_into_tensor.default, value, 2, "dp", role="start", parameter=True)
        return started, self.op(WAIT, started, role="wait", parameter=True)

    def reduce(self, value: fx.Node) -> tuple[fx.Node, fx.Node]:
        started = self.op(C10D.all_reduce.default, value, "sum", "dp", role="start")
        return started, self.op(WAIT, started, role="wait")

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(nn.Module(), self.graph)


def order(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def test_a_wait_moves_to_its_first_use():
    draft = Draft()
    x = draft.start("x", 2, 2)
    _, wait = draft.reduce(x)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    two = draft.op(ATEN.mm.default, one, wait, name="two")
    gm = draft.done(two)

    assert SinkWaits()(gm) == 1
    assert order(gm) == ["all_reduce_default", "one", "wait_tensor_default", "two"]


def test_a_wait_that_several_read_moves_to_the_first_of_them():
    draft = Draft()
    x = draft.start("x", 2, 2)
    _, wait = draft.reduce(x)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    two = draft.op(ATEN.mm.default, one, wait, name="two")
    three = draft.op(ATEN.mm.default, two, wait, name="three")
    gm = draft.done(three)

    SinkWaits()(gm)

    assert order(gm).index("wait_tensor_default") == order(gm).index("two") - 1


def test_a_wait_that_nobody_reads_stays():
    draft = Draft()
    x = draft.start("x", 2, 2)
    draft.reduce(x)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    gm = draft.done(one)
    before = order(gm)

    assert SinkWaits()(gm) == 0
    assert order(gm) == before


@pytest.mark.parametrize("each", [SinkWaits(), IssueEarly(), PrefetchGathers(1 << 20)], ids=repr)
def test_scheduling_twice_changes_nothing_more(each):
    draft = Draft()
    x, w = draft.start("x", 2, 2), draft.start("w", 1, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    _, gathered = draft.gather(w)
    two = draft.op(ATEN.mm.default, x, gathered, name="two")
    _, wait = draft.reduce(one)
    _, later = draft.gather(w)
    gm = draft.done(draft.op(ATEN.add.Tensor, two, wait), draft.op(ATEN.mm.default, two, later))
    run_passes(gm, (each,))

    assert run_passes(gm, (each,))[0].changes == 0


def test_a_reduction_is_issued_behind_what_it_reduces():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    two = draft.op(ATEN.mm.default, one, x, name="two")
    _, wait = draft.reduce(one)
    gm = draft.done(wait, two)

    run_passes(gm, (IssueEarly(), SinkWaits()))

    assert order(gm) == ["one", "all_reduce_default", "two", "wait_tensor_default"]


def layers(count: int) -> fx.GraphModule:
    draft = Draft()
    x = draft.start("x", 2, 2)
    weights = [draft.start(f"w{i}", 1, 2) for i in range(count)]
    for i, weight in enumerate(weights):
        _, gathered = draft.gather(weight)
        x = draft.op(ATEN.mm.default, x, gathered, name=f"use{i}")
    return draft.done(x)


def test_a_gather_is_issued_before_the_use_of_the_one_before():
    gm = layers(3)

    run_passes(gm, (PrefetchGathers(ahead_bytes=0),))

    found = [name.replace("all_gather_into_tensor_default", "gather") for name in order(gm) if "wait" not in name]
    assert found == ["gather", "gather_1", "use0", "gather_2", "use1", "use2"]


def test_gathers_run_ahead_as_far_as_their_bytes_allow():
    one = layers(2).graph.find_nodes(op="call_function", target=WAIT)[0].meta["val"].nbytes

    def ahead(budget: int) -> int:
        gm = layers(6)
        run_passes(gm, (PrefetchGathers(budget),))
        names = order(gm)
        return sum("gather" in name for name in names[: names.index("use0")])

    assert [ahead(budget * one) for budget in (0, 2, 3, 4, 9)] == [2, 2, 3, 4, 6]


def test_detach_of_a_tensor_is_the_tensor():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.detach.default, x)
    gm = draft.done(draft.op(ATEN.mm.default, one, one, name="mm"))

    assert DropIdentities()(gm) == 1
    assert order(gm) == ["mm"]


def test_a_result_keeps_its_last_operator():
    draft = Draft()
    x = draft.start("x", 2, 2)
    gm = draft.done(draft.op(ATEN.detach.default, x))

    assert DropIdentities()(gm) == 0


def test_a_masked_value_keeps_its_alias_since_other_ranks_have_zeros():
    draft = Draft()
    x = draft.start("x", 2, 2)
    alias = draft.op(ATEN.alias.default, x, role="move")
    alias.meta["autopar"] = Mark("other", "forward", "move")
    gm = draft.done(draft.op(ATEN.mm.default, alias, x))

    assert DropIdentities()(gm) == 0


def test_transposing_twice_is_not_transposing():
    draft = Draft()
    x = draft.start("x", 2, 3)
    gm = draft.done(draft.op(ATEN.mm.default, x, draft.op(ATEN.t.default, x), name="mm"))
    second = Draft()
    y = second.start("y", 2, 3)
    back = second.op(ATEN.t.default, second.op(ATEN.t.default, y))
    gm2 = second.done(second.op(ATEN.mm.default, back, second.start("z", 3, 2), name="mm"))

    assert DropIdentities()(gm) == 0
    assert DropIdentities()(gm2) == 1
    assert gm2.graph.find_nodes(op="call_function", target=ATEN.mm.default)[0].args[0].name == "y"


def test_equal_views_become_one_and_different_ones_stay():
    draft = Draft()
    x = draft.start("x", 2, 4)
    views = [draft.op(ATEN.view.default, x, shape) for shape in ([8], [8], [4, 2])]
    gm = draft.done(*(draft.op(ATEN.neg.default, view) for view in views))

    assert MergeEqualViews()(gm) == 1
    assert len(gm.graph.find_nodes(op="call_function", target=ATEN.view.default)) == 2


@pytest.mark.parametrize(("transposed", "target"), [(False, ATEN.view.default), (True, ATEN.reshape.default)])
def test_a_reshape_becomes_a_view_only_where_strides_allow(transposed: bool, target):
    draft = Draft()
    x = draft.start("x", 2, 4)
    source = draft.op(ATEN.t.default, x) if transposed else x
    reshaped = draft.op(ATEN.reshape.default, source, [8])
    gm = draft.done(reshaped)

    ViewWhatCanBeViewed()(gm)

    assert reshaped.target is target


def summed(*, later: bool = False, returned: bool = False, saved: bool = False) -> tuple[fx.GraphModule, fx.Node]:
    """Return a program that adds two products, of which the first may be read again, returned or a placeholder."""
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = x if saved else draft.op(ATEN.mm.default, x, x, name="one")
    two = draft.op(ATEN.relu.default, x, name="two")
    total = draft.op(ATEN.add.Tensor, one, x, name="total")
    results = [total, two]
    if later:
        results.append(draft.op(ATEN.neg.default, one))
    if returned:
        results.append(one)
    return draft.done(*results), total


@pytest.mark.parametrize(
    ("how", "target"),
    [
        ({}, ATEN.add_.Tensor),
        ({"later": True}, ATEN.add.Tensor),
        ({"returned": True}, ATEN.add.Tensor),
        ({"saved": True}, ATEN.add.Tensor),
    ],
    ids=["dead", "read later", "returned", "held by the caller"],
)
def test_a_sum_goes_into_a_term_only_if_nobody_else_can_see_it(how, target):
    gm, total = summed(**how)
    x = torch.randn(2, 2)
    want = gm(x)

    ComputeIntoDead()(gm)
    gm.recompile()

    assert total.target is target
    for a, b in zip(gm(x), want, strict=True):
        assert torch.equal(a, b)


def backward_of_relu(*, read: bool) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """Return a program that computes relu and its gradient from products; `read`: of those, something reads again."""
    draft = Draft()
    x = draft.start("x", 2, 2)
    h, grad = draft.op(ATEN.mm.default, x, x), draft.op(ATEN.mm.default, x, x)
    y = draft.op(ATEN.relu.default, h)
    back = draft.op(ATEN.threshold_backward.default, grad, y, 0)
    again = [draft.op(ATEN.mm.default, each, x) for each in (h, grad)] if read else []
    return draft.done(y, back, *again), y, back


@pytest.mark.parametrize("read", [False, True])
def test_elementwise_operators_write_into_what_nobody_reads_again(read: bool):
    gm, y, back = backward_of_relu(read=read)
    x = torch.randn(2, 2)
    want = gm(x)

    changed = ComputeIntoDead()(gm)
    gm.recompile()

    assert changed == (0 if read else 2)
    assert y.target is (ATEN.relu.default if read else ATEN.relu_.default)
    assert back.target is (ATEN.threshold_backward.default if read else ATEN.threshold_backward.grad_input)
    for a, b in zip(gm(x), want, strict=True):
        assert torch.equal(a, b)


def cross_entropy(*, read: bool) -> fx.GraphModule:
    """Return a program of cross entropy's gradient; `read`: logits and their logarithms of shares are returned, too."""
    draft = Draft()
    x, y = draft.start("x", 4, 4), draft.start("y")
    labels = draft.op(ATEN.full.default, [4], 3, name="labels")
    logits = draft.op(ATEN.mm.default, x, x, name="logits")
    scores = draft.op(ATEN._log_softmax.default, logits, 1, False, name="scores")
    back = draft.op(CROSS_ENTROPY_BACKWARD, y, scores, labels, None, 2, -100, y, name="back")
    return draft.done(back, *((logits, scores) if read else ()))


@pytest.mark.parametrize("read", [False, True])
def test_cross_entropy_takes_no_memory_beside_its_logits_where_nobody_reads_them_again(read: bool):
    gm = cross_entropy(read=read)
    x, y = torch.randn(4, 4), torch.tensor(0.5)
    want = gm(x, y)

    changed = ComputeIntoDead()(gm)
    gm.recompile()

    assert changed == (0 if read else 2)
    for a, b in zip(gm(x, y), want, strict=True):
        assert torch.equal(a, b)
    within = [node.target for node in gm.graph.nodes if node.name in {"scores", "back"}]
    assert within == ([ATEN._log_softmax.default, CROSS_ENTROPY_BACKWARD] if read else IN_PLACE)


IN_PLACE = [ATEN._log_softmax.out, CROSS_ENTROPY_BACKWARD_]


@pytest.mark.parametrize(("shape", "dim"), [((5, 7), 1), ((64, 5003), 1), ((3, 9, 4, 6), 1), ((2, 3, 1200), -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_softmax_may_write_over_what_it_reads(shape: tuple[int, ...], dim: int, dtype: torch.dtype):
    x = torch.randn(shape, dtype=dtype)
    want = torch.log_softmax(x, dim)

    ATEN._log_softmax.out(x, dim, False, out=x)

    assert torch.equal(x, want)


def test_an_operator_does_not_write_into_an_input_of_another_type():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.mm.default, x, x)
    gm = draft.done(draft.op(ATEN.lt.Scalar, one, 0))

    assert ComputeIntoDead()(gm) == 0


def test_a_sum_does_not_go_into_what_a_view_still_shows():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    view = draft.op(ATEN.view.default, one, [2, 2])
    total = draft.op(ATEN.add.Tensor, one, x)
    gm = draft.done(total, draft.op(ATEN.mm.default, view, view))

    assert ComputeIntoDead()(gm) == 0


def test_a_sum_does_not_go_into_what_a_collective_may_still_read():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    started = draft.op(C10D.all_gather_into_tensor.default, one, 2, "dp", role="start")
    total = draft.op(ATEN.add.Tensor, one, x)
    gm = draft.done(total, draft.op(WAIT, started, role="wait"))

    assert ComputeIntoDead()(gm) == 0


def test_a_value_that_only_a_reduction_reads_is_reduced_in_place():
    draft = Draft()
    x = draft.start("x", 2, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    first, wait = draft.reduce(one)
    second, other = draft.reduce(x)
    gm = draft.done(wait, other)

    assert ReduceIntoDead()(gm) == 1
    assert first.target is C10D.all_reduce_.default
    assert second.target is C10D.all_reduce.default


def scatters(*rows: int) -> fx.GraphModule:
    """Return a backward pass that scatters gradients of so many rows one by one, and waits for all at its end."""
    graph = fx.Graph()
    starts = []
    for number, each in enumerate(rows):
        value = graph.placeholder(f"x{number}")
        value.meta["val"] = torch.empty(2 * each, 4)
        start = graph.create_node(
            "call_function", C10D.reduce_scatter_tensor.default, (value, "sum", 2, "dp"), name=f"scatter{number}"
        )
        start.meta.update(val=torch.empty(each, 4), autopar=Mark(start.name, "backward", "start", "", gradient=True))
        starts.append(start)
    waits = []
    for number, start in enumerate(starts):
        wait = graph.create_node("call_function", WAIT, (start,), name=f"wait{number}")
        wait.meta.update(val=start.meta["val"], autopar=Mark(wait.name, "backward", "wait"))
        waits.append(wait)
    graph.output(tuple(waits))
    return fx.GraphModule(nn.Module(), graph)


def test_a_scattered_gradient_is_waited_for_when_as_many_bytes_are_issued_behind_it():
    gm = scatters(8, 1, 1, 8, 8)

    run_passes(gm, (SettleScatters(),))

    assert order(gm) == [
        "scatter0", "scatter1", "scatter2", "scatter3", "wait0", "wait1", "wait2", "scatter4", "wait3", "wait4",
    ]  # fmt: skip


def test_a_gradient_gathered_under_its_parameters_name_is_not_issued_ahead_of_what_makes_it():
    draft = Draft()
    x, weight = draft.start("x", 2, 2), draft.start("weight", 1, 2)
    one = draft.op(ATEN.mm.default, x, x, name="one")
    two = draft.op(ATEN.mm.default, one, one, name="two")
    gathered, whole = draft.gather(weight)
    used = draft.op(ATEN.mm.default, two, whole, name="used")
    moved, gradient = draft.gather(used)
    for node, is_gradient in ((gathered, False), (moved, True)):
        node.meta["autopar"] = Mark(node.name, "backward", "start", "weight", gradient=is_gradient)
    gm = draft.done(gradient)

    run_passes(gm, (IssueAhead((Ahead(axis="dp", phase="backward", tensor="weight", before="two"),)),))

    assert order(gm) == ["one", gathered.name, "two", whole.name, "used", moved.name, gradient.name]
