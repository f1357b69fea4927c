"""What gloo does badly, done with what it does well.

torch's gloo backend notes the name of each collective that it completed in a string that its two threads write without
a lock (`ProcessGroupGloo::runLoop`, 2.11 to 2.13). Two that complete at once free it twice, and the rank dies of a
corrupt heap: seen within seconds in programs that keep many gathers in flight. One thread a group has no such race.

gloo has no reduce-scatter of its own: torch all-reduces the whole tensor and
keeps a slice, twice the traffic. Exchanging the parts pairwise and adding them up
sends what a reduce-scatter must, and no more: Thakur, Rabenseifner & Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005. Its
all-gather and all-to-all let the directions of a link take turns; see `exchange`.
Sums that travel together it copies to one new buffer and back, large ones too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch import LazyGraphModule, gloo_with_threads
from autopar.runtime.direct import DIRECT
from autopar.runtime.exchange import REDUCE

_C10D = torch.ops._c10d_functional

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


_DIRECT: dict[Any, Any] = {
    _C10D.all_gather_into_tensor.default: DIRECT.all_gather.default,
    _C10D.all_gather_into_tensor_coalesced.default: DIRECT.all_gather.default,
    _C10D.reduce_scatter_tensor.default: DIRECT.reduce_scatter.default,
    _C10D.reduce_scatter_tensor_coalesced.default: DIRECT.reduce_scatter.default,
    _C10D.all_to_all_single.default: DIRECT.all_to_all.default,
    _C10D.all_reduce_coalesced.default: DIRECT.all_reduce.default,
    _C10D.all_reduce_coalesced_.default: DIRECT.all_reduce_.default,
}
_REDUCING = (DIRECT.reduce_scatter.default, DIRECT.all_reduce.default, DIRECT.all_reduce_.default)


def by_messages(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the program with the collectives that gloo does badly as those of `direct`.

    `gm` is not changed; it is returned if it has none of these.
    """
    if not any(_as_messages(node) for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for start in [node for node in graph.nodes if _as_messages(node)]:
        arguments: Any = start.args
        start.target = _DIRECT[start.target]
        if start.target is DIRECT.all_to_all.default or not isinstance(arguments[0], fx.Node):
            continue
        start.args = ([arguments[0]], *arguments[1:])
        with graph.inserting_after(start):
            part = graph.call_function(operator.getitem, (start, 0))
        start.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)
    graph.lint()
    return LazyGraphModule(gm, graph)


def _as_messages(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or target not in _DIRECT:
        return False
    return _DIRECT[target] not in _REDUCING or node.args[1] in REDUCE
