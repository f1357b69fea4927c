"""Programs that add their gradients to sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.runtime.executable import compile_graph
from autopar.runtime.summing import summing

A, B = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
IDS = torch.tensor([[1, 0, 1], [4, 4, 4]])
ROWS = torch.randn(2, 3, 4, dtype=torch.float64)
EXPERTS = torch.randn(2, 3, 5, dtype=torch.float64)

TERMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], set[str]]] = {
    "product": (lambda a, b: torch.mm(a.t(), b), (A, B), {"addmm_", "t"}),
    "product in the other order of memory": (lambda a, b: torch.mm(a.t(), b).t(), (A, B), {"addmm_", "t"}),
    "product with its rows in heads": (lambda a, b: torch.mm(a.t(), b).view(2, 2, 3), (A, B), {"addmm_", "t", "view"}),
    "products of experts": (lambda a, b: torch.bmm(a, b).permute(1, 2, 0), (ROWS.mT, EXPERTS), {"baddbmm_", "permute"}),
    "look-up": (
        lambda g, ids: torch.ops.aten.embedding_dense_backward(g, ids, 5, -1, False),
        (ROWS, IDS),
        {"index_add_", "reshape"},
    ),
    "look-up that leaves a row out": (
        lambda g, ids: torch.ops.aten.embedding_dense_backward(g, ids, 5, 1, False),
        (ROWS, IDS),
        {"index_add_", "reshape", "eq", "masked_fill", "unsqueeze"},
    ),
    "look-up whose other rows are elsewhere": (
        lambda g, ids: torch.ops.aten.embedding_dense_backward(g, ids.masked_fill(ids > 2, -2), 3, -2, False),
        (ROWS, IDS),
        {"index_add_", "reshape", "eq", "masked_fill", "unsqueeze", "gt"},
    ),
    "sum": (lambda a, b: a.sum(0), (A, B), {"sum", "add_"}),
    "argument": (lambda a, b: a, (A, B), {"add_"}),
}


def _names(gm: fx.GraphModule) -> set[str]:
    return {str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("term", "given", "operators"), TERMS.values(), ids=TERMS)
def test_a_gradient_is_added_to_its_sum_where_it_is_made(
    term: Callable[..., Any], given: tuple[torch.Tensor, ...], operators: set[str]
) -> None:
    gm = make_fx(lambda *args: (term(*args), args[0] * 2))(*given)
    found = summing(gm, {0: "w"})
    held = found.zeros("w", torch.device("cpu"))
    seen: list[torch.Tensor] = []

    run = compile_graph(found.program, {}, boxed=True, taken={0: lambda _: seen.append(held.clone())})
    for _ in range(3):
        gradient, other = run([held, *given])
        assert gradient is None
        torch.testing.assert_close(other, given[0] * 2)

    torch.testing.assert_close(seen, [term(*given) * times for times in (1, 2, 3)])
    torch.testing.assert_close(held, term(*given) * 3)
    assert held.stride() == term(*given).stride()
    assert _names(found.program) - {"mul"} == operators


def test_a_gradient_that_others_read_is_still_made() -> None:
    gm = make_fx(lambda a, b: (torch.mm(a.t(), b), (made := torch.mm(a.t(), a)), made, made.sum()))(A, B)
    found = summing(gm, {0: "w", 1: "u", 3: "bias"})
    sums = {name: found.zeros(name, torch.device("cpu")) for name in found.like}

    results = compile_graph(found.program, {}, boxed=True)([*sums.values(), A, B])

    torch.testing.assert_close(sums, {"w": A.T @ B, "u": A.T @ A, "bias": (A.T @ A).sum()})
    torch.testing.assert_close(results[2], A.T @ A)
