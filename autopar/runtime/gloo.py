"""What gloo does badly, done with what it does well.

gloo has no reduce-scatter of its own: torch all-reduces the whole tensor and
keeps a slice, twice the traffic (8 MiB between two hosts at 1 Gbit/s: 76 ms, an
all-reduce 70 ms, an all-to-all 42 ms). Exchanging the parts pairwise and adding
them up sends what a reduce-scatter must, and no more: Thakur, Rabenseifner &
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import torch
from torch import fx

_C10D = torch.ops._c10d_functional
_ATEN = torch.ops.aten


def exchange_to_reduce(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the program with each sum over ranks that is then scattered as an exchange and a local sum.

    Terms are added in the order of ranks, the same for every element. `gm` is not changed; it is returned if it has no
    such reduction.
    """
    if not gm.graph.find_nodes(op="call_function", target=_C10D.reduce_scatter_tensor.default):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for start in graph.find_nodes(op="call_function", target=_C10D.reduce_scatter_tensor.default):
        value, reduce, ranks, group = start.args
        if reduce != "sum":
            continue
        waits = [each for each in start.users if each.target is _C10D.wait_tensor.default]
        if len(waits) != 1 or len(start.users) != 1:
            continue
        (wait,) = waits
        kept = list(start.meta["val"].shape)
        splits = [kept[0]] * ranks
        start.target = _C10D.all_to_all_single.default
        start.args = (value, splits, splits, group)
        with graph.inserting_after(wait):
            terms = graph.call_function(_ATEN.view.default, (wait, [ranks, *kept]))
        with graph.inserting_after(terms):
            total = graph.call_function(_ATEN.sum.dim_IntList, (terms, [0]))
        wait.replace_all_uses_with(total, delete_user_cb=lambda user, terms=terms: user is not terms)
    graph.lint()
    return fx.GraphModule(gm, graph)
