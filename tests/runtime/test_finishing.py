"""Reductions of summed gradients begin when their last sum is there, and are waited for at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import fx

from autopar.runtime.executable import compile_graph
from autopar.runtime.finishing import Finishing

C10D = torch.ops._c10d_functional
NAMES = ("a", "b", "c", "d", "e")


def program() -> fx.GraphModule:
    """Return a program: `a` and `b` travel together, `c` alone, `d` is halved, `e` stays as it is."""
    graph = fx.Graph()
    a, b, c, d, e = (graph.placeholder(name) for name in NAMES)
    both = graph.call_function(C10D.all_reduce_coalesced.default, ([a, b], "sum", "g"))
    parts = [graph.call_function(lambda values, at: values[at], (both, i)) for i in range(2)]
    done = [graph.call_function(C10D.wait_tensor.default, (part,)) for part in parts]
    alone = graph.call_function(C10D.all_reduce.default, (c, "sum", "g"))
    waited = graph.call_function(C10D.wait_tensor.default, (alone,))
    added = graph.call_function(torch.ops.aten.add.Tensor, (waited, e))
    half = graph.call_function(torch.ops.aten.slice.Tensor, (d, 0, 0, 1))
    graph.output((*done, added, half, e))
    return fx.GraphModule({}, graph)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is issued and waited for, in order; a reduction over two ranks doubles."""
    log: list[str] = []

    def compile_boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
        for node in gm.graph.nodes:
            name = str(node.target)
            if "coalesced" in name:
                node.target = lambda values, *_: log.append("reduce a b") or [2 * each for each in values]
            elif "all_reduce" in name:
                node.target = lambda value, *_: log.append("reduce c") or 2 * value
            elif "wait" in name:
                node.target = lambda value: log.append("wait") or value
        return compile_graph(gm, {}, boxed=True)

    monkeypatch.setattr("tests.runtime.test_finishing.COMPILE", compile_boxed)
    return log


COMPILE: Callable[[fx.GraphModule], Any] = lambda gm: gm  # noqa: E731


@pytest.mark.parametrize("order", list(permutations(range(5)))[::17])
def test_each_reduction_is_issued_with_the_last_sum_it_takes(order: tuple[int, ...], said: list[str]):
    finishing = Finishing(program(), NAMES, ("ga", "gb", "gc", "gd", "ge"), COMPILE)
    for _ in range(2):
        said.clear()
        given = set()
        for index in order:
            finishing.give(NAMES[index], torch.full((2,), float(index)))
            given.add(NAMES[index])
            assert ("reduce a b" in said) == ({"a", "b"} <= given)
            assert ("reduce c" in said) == ("c" in given)
            assert "wait" not in said
        made = finishing.end()

        assert said.count("wait") == 3
        assert {name: value.tolist() for name, value in made.items()} == {
            "ga": [0.0, 0.0],
            "gb": [2.0, 2.0],
            "gc": [8.0, 8.0],
            "gd": [3.0],
            "ge": [4.0, 4.0],
        }
