"""What gloo does badly, done with what it does well.

torch's gloo backend notes the name of each collective that it completed in a string that its two threads write without
a lock (`ProcessGroupGloo::runLoop`, 2.11 to 2.13). Two that complete at once free it twice, and the rank dies of a
corrupt heap: seen within seconds in programs that keep many gathers in flight. One thread a group has no such race.

gloo has no reduce-scatter of its own: torch all-reduces the whole tensor and
keeps a slice, twice the traffic (8 MiB between two hosts at 1 Gbit/s: 76 ms, an
all-reduce 70 ms, an all-to-all 42 ms). Exchanging the parts pairwise and adding
them up sends what a reduce-scatter must, and no more: Thakur, Rabenseifner &
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch import gloo_with_threads

_C10D = torch.ops._c10d_functional
_ATEN = torch.ops.aten

ONE_THREAD = "autopar_gloo"
"""Name of the backend that runs a group's collectives one after another."""


def is_gloo(device_type: str) -> bool:
    """Return whether the default process group serves a type of device by gloo."""
    return f"{device_type}:gloo" in str(dist.get_backend_config())


def backend_name(device_type: str) -> str:
    """Return the backend that the default process group has for a type of device, empty if there is no group."""
    if not dist.is_initialized():
        return ""
    pairs = (each.partition(":") for each in str(dist.get_backend_config()).split(","))
    return next((name for device, _, name in pairs if device == device_type), "")


def one_thread_backend() -> str:
    """Return the name of the gloo backend with one thread a group, made known to torch."""
    if ONE_THREAD not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            ONE_THREAD,
            lambda store, rank, size, timeout: gloo_with_threads(store, rank, size, timeout, threads=1),
            devices="cpu",
        )
    return ONE_THREAD


def exchange_to_reduce(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the program with each sum over ranks that is then scattered as an exchange and a local sum.

    Terms are added in the order of ranks, the same for every element. `gm` is not changed; it is returned if it has no
    such reduction.
    """
    scatters = (_C10D.reduce_scatter_tensor.default, _C10D.reduce_scatter_tensor_coalesced.default)
    if not any(gm.graph.find_nodes(op="call_function", target=each) for each in scatters):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for start in graph.find_nodes(op="call_function", target=scatters[0]):
        if start.args[1] == "sum":
            _exchange_one(graph, start)
    for start in graph.find_nodes(op="call_function", target=scatters[1]):
        if start.args[1] == "sum":
            _exchange_several(graph, start)
    graph.lint()
    return fx.GraphModule(gm, graph)


def _exchange_one(graph: fx.Graph, start: fx.Node) -> None:
    arguments: Any = start.args
    value, _, ranks, group = arguments
    waits = [each for each in start.users if each.target is _C10D.wait_tensor.default]
    if len(waits) != 1 or len(start.users) != 1:
        return
    (wait,) = waits
    kept = list(start.meta["val"].shape)
    splits = [kept[0]] * ranks
    start.target = _C10D.all_to_all_single.default
    start.args = (value, splits, splits, group)
    with graph.inserting_after(wait):
        terms = graph.call_function(_ATEN.view.default, (wait, [ranks, *kept]))
    with graph.inserting_after(terms):
        total = graph.call_function(_ATEN.sum.dim_IntList, (terms, [0]))
    wait.replace_all_uses_with(total, delete_user_cb=lambda user: user is not terms)


def _exchange_several(graph: fx.Graph, start: fx.Node) -> None:
    """Exchange what several tensors send to each rank in one piece: row r of the buffer goes to rank r.

    The parts are views of the one sum.
    """
    arguments: Any = start.args
    values, _, ranks, group = arguments
    parts = list(start.users)
    waits = [each for part in parts for each in part.users]
    if any(part.target is not operator.getitem for part in parts) or any(
        wait.target is not _C10D.wait_tensor.default for wait in waits
    ):
        return
    with graph.inserting_before(start):
        rows = [graph.call_function(_ATEN.reshape.default, (each, [ranks, -1])) for each in values]
        buffer = graph.call_function(_ATEN.cat.default, (rows, 1))
    kept = start.meta["val"]
    start.target = _C10D.all_to_all_single.default
    start.args = (buffer, [1] * ranks, [1] * ranks, group)
    first = min(waits)
    with graph.inserting_before(first):
        done = graph.call_function(_C10D.wait_tensor.default, (start,))
        done.meta = {key: value for key, value in first.meta.items() if key != "val"}
        total = graph.call_function(_ATEN.sum.dim_IntList, (done, [0]))
        pieces = graph.call_function(_ATEN.split_with_sizes.default, (total, [each.numel() for each in kept]))
        for part in parts:
            index = part.args[1]
            piece = graph.call_function(operator.getitem, (pieces, index))
            whole = graph.call_function(_ATEN.view.default, (piece, list(kept[index].shape)))
            for wait in part.users:
                wait.replace_all_uses_with(whole)
    for each in (*waits, *parts):
        graph.erase_node(each)
