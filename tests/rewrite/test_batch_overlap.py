"""A program of two micro-batches, made of that of one."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.rewrite.batch_overlap import Interleaving
from autopar.rewrite.marks import C10D, WAIT, Mark
from autopar.rewrite.staged import Item

_ATEN = torch.ops.aten


class Written:
    """A program written by hand, on fake tensors of four elements."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def value(self) -> torch.Tensor:
        with self.mode:
            return torch.empty(4)

    def take(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.value()
        return node

    def call(self, target: object, *args: object, mark: Mark | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"val": self.value(), "autopar": mark or Mark(node.name, "forward")}
        return node

    def summed(self, value: fx.Node, *, gradient: bool = False) -> fx.Node:
        """Return the sum of a value over ranks, waited for."""
        marks = (Mark("x", "forward", role, "x", gradient=gradient) for role in ("start", "wait"))
        started = self.call(C10D.all_reduce.default, value, "sum", "tp", mark=next(marks))
        return self.call(WAIT, started, mark=next(marks))

    def program(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def names(gm: fx.GraphModule) -> list[str]:
    """Return the operators of a program in their order, the second of a kind as `KIND_1`."""
    found = (node.name for node in gm.graph.nodes if node.op == "call_function")
    return [name.replace("_default", "").replace("_tensor", "") for name in found]


def test_one_computes_while_the_other_waits():
    written = Written()
    x, w = written.take("x"), written.take("w")
    shared = written.call(_ATEN.exp.default, w)
    first = written.call(_ATEN.mul.Tensor, x, shared)
    second = written.call(_ATEN.relu.default, written.summed(first))
    gm = written.program(second)

    made, takes, gives = Interleaving({"x"})(gm, [Item("start", "x"), Item("start", "w")], [Item("output", "y")])

    assert names(made) == [
        *("exp", "mul", "all_reduce", "mul_1", "all_reduce_1"),
        *("wait", "relu", "wait_1", "relu_1"),
    ]
    assert takes == (Item("start", "x"), Item("start", "w"), Item("start", "x", 1))
    assert gives == (Item("output", "y"), Item("output", "y", 1))


def test_values_of_the_second_are_in_memory_of_their_own():
    written = Written()
    x = written.take("x")
    gm = written.program(written.call(_ATEN.relu.default, x), written.call(_ATEN.neg.default, x))

    made, _, _ = Interleaving({"x"})(gm, [Item("start", "x")], [Item("output", "y"), Item("output", "z")])

    values = [node.meta["val"] for node in made.graph.nodes if node.op == "call_function"]
    assert len({each.untyped_storage()._cdata for each in values}) == len(values) == 4


def test_kept_values_are_told_apart_and_what_no_input_reaches_is_kept_once():
    interleaving = Interleaving({"x"})
    written = Written()
    x, w = written.take("x"), written.take("w")
    gm = written.program(written.call(_ATEN.relu.default, x), written.call(_ATEN.exp.default, w))
    _, _, gives = interleaving(
        gm, [Item("start", "x"), Item("start", "w")], [Item("value", "relu"), Item("value", "exp")]
    )
    assert gives == (Item("value", "relu"), Item("value", "exp"), Item("value", "relu__second", 1))

    later = Written()
    relu, exp = later.take("relu"), later.take("exp")
    gm = later.program(later.call(_ATEN.mul.Tensor, relu, exp))
    _, takes, gives = interleaving(gm, [Item("value", "relu"), Item("value", "exp")], [Item("gradient", "w")])
    assert takes == (Item("value", "relu"), Item("value", "exp"), Item("value", "relu__second", 1))
    assert gives == (Item("gradient", "w"), Item("gradient", "w", 1))


def test_gradients_that_go_to_their_places_go_there_once():
    written = Written()
    x = written.take("x")
    gm = written.program(written.summed(written.call(_ATEN.relu.default, x), gradient=True))

    made, _, gives = Interleaving({"x"})(gm, [Item("start", "x")], [Item("gradient", "w")])

    assert names(made) == ["relu", "relu_1", "add", "all_reduce", "wait"]
    assert gives == (Item("gradient", "w"),)
    run = made.graph.find_nodes(op="call_function", target=_ATEN.add.Tensor)[0]
    assert [each.name for each in run.all_input_nodes] == ["relu_default", "relu_default_1"]
