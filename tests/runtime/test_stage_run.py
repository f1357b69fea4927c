"""One stage's gradients and what it keeps."""

from __future__ import annotations

import torch
from torch import fx

from autopar.runtime.executable import compile_graph
from autopar.runtime.stage_run import StageRun
from tests.support.chain import Item, StageProgram


def graph(arguments: int, *results: int | str) -> fx.GraphModule:
    """Return a program that returns arguments as they are, or for `double`, `row` what it computes of the first."""
    made = fx.Graph()
    given = [made.placeholder(f"a{i}") for i in range(arguments)]
    double = made.call_function(torch.ops.aten.add.Tensor, (given[0], given[0]))
    row = made.call_function(torch.ops.aten.select.int, (double, 0, 0))
    found = {"double": double, "row": row}
    made.output(tuple(given[each] if isinstance(each, int) else found[each] for each in results))
    return fx.GraphModule({}, made)


def test_gradients_that_are_seen_elsewhere_are_copied_before_others_are_added_to_them():
    program = StageProgram(
        0,
        graph(1, 0),
        (Item("start", "x"),),
        (Item("value", "h"),),
        graph(2, "double", "double", "row", 1),
        (Item("value", "h"), Item("tangent", "t")),
        (Item("value", "sent"), Item("gradient", "w"), Item("gradient", "row"), Item("gradient", "scale")),
    )
    run = StageRun(program, lambda gm, taken: compile_graph(gm, {}, boxed=True, taken=taken), backward=True)
    x, one = torch.ones(2, 2), torch.ones(())
    sent = []
    for microbatch in range(3):
        run.run("F", microbatch, lambda *_: x, None)
        made = run.run("B", microbatch, lambda *_: x, one)
        sent.append(made.values["sent"])
        for (name, _), gradient in made.gradients.items():
            run.add(name, gradient)

    assert [each.sum().item() for each in sent] == [8, 8, 8]
    assert one == 1
    found = run.finished()
    assert torch.equal(found["w"], torch.full((2, 2), 6.0))
    assert torch.equal(found["row"], torch.full((2,), 6.0))
    assert found["scale"] == 3
    assert found["row"].untyped_storage().nbytes() == found["row"].nbytes
