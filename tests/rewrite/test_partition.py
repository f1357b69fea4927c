"""What goes from forward to backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.placement import Replicate, Shard
from autopar.ir.strategy import Strategy
from autopar.rewrite import rewrite
from autopar.rewrite.partition import copied_behind
from tests.support.decide import decide, mesh_of
from tests.support.models import Mlp, Vision, cases
from tests.support.whole import Whole, run_ranks


def mlp() -> Whole:
    return Whole.of(*cases()["mlp"])


def saved_bytes(whole: Whole, decisions) -> int:
    """Return the bytes of distinct memory that the first rank saves by value."""
    programs = rewrite(whole.captured.joint, whole.captured.graph, decisions, 0)
    made = programs.forward.graph.find_nodes(op="output")[0].args[0]
    values = [node.meta["val"] for node in made[len(programs.outputs) + len(programs.mutations) :]]
    given = {node.meta["val"].untyped_storage()._cdata for node in programs.forward.graph.find_nodes(op="placeholder")}
    storages = {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}
    return sum(size for key, size in storages.items() if key not in given)


def test_gathered_parameters_are_not_saved_when_each_phase_gathers():
    whole, mesh = mlp(), mesh_of(dp=2)

    phased = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh, zero=True), 0)
    kept = decide(whole.captured.graph, mesh, zero=True, gather="once")
    once = rewrite(whole.captured.joint, whole.captured.graph, kept, 0)

    def gathers(programs, phase):
        return sorted(e.tensor for e in programs.emitted if e.op == "all_gather" and e.phase == phase)

    assert gathers(phased, "backward") == ["down.weight"]
    assert gathers(once, "backward") == []
    assert gathers(once, "forward") == gathers(phased, "forward")
    gathered = {node.name for node in phased.forward.graph.nodes if "wait" in node.name}
    assert not gathered & {each.name for each in phased.saved}


def test_parameters_and_inputs_are_saved_as_references():
    whole = mlp()

    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of()), 0)

    inputs = [each.name for each in programs.inputs]
    by_reference = {inputs[each.index] for each in programs.saved if each.source == "input"}
    targets = {op.name: op.target for op in whole.captured.graph.ops}
    assert {targets[name] for name in by_reference} == {"down.weight", "x", "y"}


@pytest.mark.parametrize("name", ["mlp", "vision", "tied", "plain"])
def test_no_more_is_saved_than_eager_saves(name: str):
    model, example = cases()[name]
    whole = Whole.of(model, example)
    held = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    given = example.values() if isinstance(example, dict) else example
    held |= {t.untyped_storage()._cdata for t in given}
    eager: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            eager[storage._cdata] = storage.nbytes()
            kept.append(storage)
        return tensor

    kept: list[object] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(**example) if isinstance(example, dict) else model(*example)
    del result

    ours = saved_bytes(whole, decide(whole.captured.graph, mesh_of()))

    assert ours <= sum(eager.values())


class Exponential(nn.Module):
    """Backward reads forward's result, and nothing else of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).exp().sum()


def test_what_backward_reads_a_slice_of_is_saved_as_that_slice():
    whole = Whole.of(Exponential(), (torch.randn(8, 8),))
    graph = whole.captured.graph
    product = next(op for op in graph.ops if op.target == "aten.mul.Tensor" and op.phase == "backward")
    rows = Strategy((Shard(0), Shard(0)), (Shard(0),))

    sliced = decide(graph, mesh_of(tp=2), operators={product.name: (rows,)})

    assert saved_bytes(whole, decide(graph, mesh_of(tp=2))) == 8 * 16 * 4
    assert saved_bytes(whole, sliced) == 8 * 16 * 4 // 2


class Flattened(nn.Module):
    """Reads rows of a value whose dimensions lie in memory in another order, and views them so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = (self.weight.exp() * x.transpose(0, 1)).exp()
        return made.transpose(0, 1).flatten(1).sin().sum()


def test_a_slice_that_is_saved_lies_in_memory_as_what_it_is_cut_from():
    whole = Whole.of(Flattened(), (torch.randn(4, 8, 6),))
    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of(tp=2)), 0)
    graph = programs.forward.graph
    node = next(each for each in graph.nodes if each.name.startswith("transpose"))

    copy = copied_behind(graph, node)

    real = torch.empty_strided(node.meta["val"].shape, node.meta["val"].stride())
    assert copy.target(real, **copy.kwargs).stride() == copy.meta["val"].stride()


def test_gradients_that_are_slices_own_their_memory():
    whole, mesh = mlp(), mesh_of(dp=2)
    decisions = decide(whole.captured.graph, mesh, zero=True)

    ranked = run_ranks(whole, decisions)

    for place, output in enumerate(whole.captured.graph.outputs):
        made = ranked.results[1][place]
        if output.kind == "gradient" and made is not None:
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


class Overwritten(nn.Module):
    """A buffer that forward reads, then overwrites; backward needs what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x * self.weight * self.scale.clone()).sum()
        self.scale.copy_(self.scale * 3)
        return out


def test_a_buffer_that_forward_overwrites_is_not_saved_as_a_reference():
    whole = Whole.of(Overwritten(), (torch.randn(4),))

    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of()), 0)

    mutated = {each.name for each in programs.mutations}
    names = [each.name for each in programs.inputs]
    assert mutated
    assert not any(each.source == "input" and names[each.index] in mutated for each in programs.saved)


def test_programs_without_backward_have_none():
    whole = Whole.of(Mlp(), (torch.randn(8, 8), torch.randint(0, 4, (8,))), with_backward=False)

    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of()), 0)

    assert programs.backward is None
    assert programs.saved == ()


def test_mutations_leave_in_the_buffers_layout():
    whole = Whole.of(Vision(), {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 4, (4,))})

    programs = rewrite(whole.captured.joint, whole.captured.graph, decide(whole.captured.graph, mesh_of(dp=2)), 0)

    assert len(programs.mutations) == 3
    assert all(each.layout == (Replicate(),) for each in programs.mutations)
