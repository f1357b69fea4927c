"""Which operator of a rewritten program is the first to be wrong: for people who debug a rule or a lowering.

print(first_wrong(Whole.of(model, example), decisions))
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.ir.graph import Ref
from autopar.ir.placement import Partial, Replicate
from autopar.ir.plan import Decisions
from autopar.rewrite.spmd import Localiser
from tests.support import lockstep
from tests.support.whole import Whole, part


def first_wrong(whole: Whole, decisions: Decisions, rtol: float = 1e-3, atol: float = 1e-5) -> str:
    """Return the first operator whose value differs from the whole program's although its inputs do not; else ''."""
    captured, mesh = whole.captured, decisions.mesh
    wanted = _values(whole)
    locals_ = [Localiser(captured.joint, captured.graph, decisions, rank) for rank in range(mesh.world_size)]
    programs = [each.run() for each in locals_]
    refs = [Ref(op.name, i) for op in captured.graph.ops for i, m in enumerate(op.outputs) if m is not None]
    for each, program in zip(locals_, programs, strict=True):
        nodes = []
        output = program.graph.find_nodes(op="output")[0]
        with program.graph.inserting_before(output):
            for ref in refs:
                nodes.append(each._value(ref, None))
        output.args = (tuple(nodes),)
    names = [node.name for node in programs[0].graph.find_nodes(op="placeholder")]
    layouts = [locals_[0].layout(Ref(name)) for name in names]
    given = [
        [part(whole.values[n], layout, mesh, rank) for n, layout in zip(names, layouts, strict=True)]
        for rank in range(mesh.world_size)
    ]
    with torch.no_grad():
        made = lockstep.run(programs, given, mesh)
    for place, ref in enumerate(refs):
        layout = locals_[0].layout(ref)
        plain = tuple(Replicate() if isinstance(p, Partial) else p for p in layout)
        for rank in range(mesh.world_size):
            beside = [
                other
                for other in range(mesh.world_size)
                if all(
                    isinstance(p, Partial) or a == b
                    for p, a, b in zip(layout, mesh.coordinate(rank), mesh.coordinate(other), strict=True)
                )
            ]
            got = torch.stack([made[other][place].double() for other in beside])
            kinds = {p.reduce for p in layout if isinstance(p, Partial)}
            total = got.amax(0) if "max" in kinds else got.mean(0) if "avg" in kinds else got.sum(0)
            want = part(wanted[ref].double(), plain, mesh, rank)
            if not torch.allclose(total, want, rtol=rtol, atol=atol, equal_nan=True):
                op = captured.graph.by_name[ref.op]
                strategy = decisions.operators[captured.graph.representative(op.name)].strategy
                return f"{op.name}[{ref.index}] {op.where} on rank {rank}: {strategy}; {op.args} {layout}"
    return ""


def _values(whole: Whole) -> dict[Ref, torch.Tensor]:
    found: dict[Ref, torch.Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            value = super().run_node(n)
            if n.op != "output" and n.target is not operator.getitem:
                each = value if isinstance(value, tuple | list) else (value,)
                found.update({Ref(n.name, i): v for i, v in enumerate(each) if isinstance(v, torch.Tensor)})
            return value

    with torch.no_grad():
        Keep(whole.captured.joint).run(*[whole.values[p.name] for p in whole.captured.placeholders])
    return found
