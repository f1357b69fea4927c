"""Every rank's program in one process: ranks run until they meet in a collective, and go on with what it gives.

Programs are fx graphs, one a rank, with `_c10d_functional` collectives that name a mesh axis as their group.
Each rank runs by itself up to its next collective; a collective happens when all ranks of its group have come
to it. Ranks that wait for different things, or for each other in a circle, are an error that says so; so is a
result read before its `wait_tensor`. Values are exact, there are no processes, and nothing is timed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.runtime.executable import WHATEVER_STRIDES

_FUNCTIONAL = torch.ops._c10d_functional
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


class LockstepError(AssertionError):
    """The ranks' programs do not fit together."""


@dataclass(frozen=True)
class Issued:
    """One collective as one rank issued it."""

    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `broadcast`."""

    axis: int
    bytes: int
    """Of the larger of the local buffers, of all tensors together where several are coalesced."""

    reduce: str = ""


@dataclass
class _Pending:
    """The result of a collective that was not waited for."""

    value: torch.Tensor


@dataclass
class _Meeting:
    """A rank's request: it goes on when its group has met."""

    name: str
    group: str
    args: tuple[Any, ...]
    node: str


Rank = Generator[_Meeting, Any, Any]


def run(
    programs: Sequence[fx.GraphModule | fx.Graph],
    inputs: Sequence[Sequence[Any]],
    mesh: Mesh,
    *,
    axis_of: Mapping[str, str] | None = None,
    issued: list[list[Issued]] | None = None,
    under_way: bool = False,
) -> list[Any]:
    """Return what each rank's program returns, given each rank's inputs (in the order of its placeholders).

    A bare graph runs as well as a module, if it reads no attributes.

    `axis_of` gives the mesh axis of group names that are not axis names themselves. What each rank issued is
    appended to `issued`, one list a rank, in order. With `under_way` programs may return what they have not waited for.

    Raises:
        LockstepError: the programs do not issue the same collectives in each group.
    """
    count = mesh.world_size
    if len(programs) != count or len(inputs) != count:
        raise LockstepError(f"{len(programs)} programs and {len(inputs)} lists of inputs for {count} ranks")
    logs = [[] for _ in range(count)] if issued is None else issued
    logs.extend([] for _ in range(count - len(logs)))
    ranks: list[Rank] = [_rank(program, given, under_way) for program, given in zip(programs, inputs, strict=True)]
    results: list[Any] = [None] * count
    waiting: dict[int, _Meeting] = {}

    def advance(rank: int, value: Any) -> None:
        try:
            waiting[rank] = ranks[rank].send(value)
        except StopIteration as done:
            results[rank] = done.value

    for rank in range(count):
        advance(rank, None)
    while waiting:
        axis, members = _next_group(waiting, mesh, axis_of or {})
        meetings = [waiting.pop(rank) for rank in members]
        values = _collective(meetings)
        for rank, meeting, value in zip(members, meetings, values, strict=True):
            logs[rank].append(_log(meeting, axis, value))
            advance(rank, _pend(value))
    return results


def _rank(program: fx.GraphModule | fx.Graph, inputs: Sequence[Any], under_way: bool) -> Rank:
    """Run one rank's graph; yields at each collective and is sent what it gives."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    graph = program if isinstance(program, fx.Graph) else program.graph
    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = operator.attrgetter(node.target)(program)
        elif node.op == "output":
            return fx.map_arg(node.args[0], env.__getitem__) if under_way else _values(node.args[0], env, node)
        else:
            env[node] = yield from _call(node, env)
        for dead in last_use.get(node, ()):
            env.pop(dead, None)
    return None


def _call(node: fx.Node, env: Mapping[Any, Any]) -> Generator[_Meeting, Any, Any]:
    target: Any = node.target
    name = _functional_name(target)
    if name == "wait_tensor":
        pending = env[node.args[0]]
        return pending.value if isinstance(pending, _Pending) else pending
    if target is operator.getitem:
        return env[node.args[0]][node.args[1]]
    args, kwargs = _values(node.args, env, node), _values(node.kwargs, env, node)
    if name:
        arguments = [argument.name for argument in target._schema.arguments]
        group = dict(zip(arguments, args, strict=False), **kwargs)["group_name"]
        return (yield _Meeting(name, group, tuple(args), node.name))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return WHATEVER_STRIDES.get(target, target)(*args, **kwargs)


def _functional_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target._schema.name.split("::")[1])
    return ""


def _values(arg: Any, env: Mapping[fx.Node, Any], read_by: fx.Node) -> Any:
    return fx.map_arg(arg, lambda made_by: _ready(env[made_by], made_by, read_by))


def _ready(value: Any, made_by: fx.Node, read_by: fx.Node) -> Any:
    if isinstance(value, _Pending):
        raise LockstepError(f"{read_by.name} reads {made_by.name} before it was waited for")
    return value


def waited(value: Any) -> Any:
    """Return a value, waited for if it is under way."""
    return value.value if isinstance(value, _Pending) else value


def _pend(value: Any) -> Any:
    return [_Pending(each) for each in value] if isinstance(value, list) else _Pending(value)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes:
            found[read] = node
    last: dict[fx.Node, list[fx.Node]] = {}
    for read, node in found.items():
        last.setdefault(node, []).append(read)
    return last


def _next_group(waiting: Mapping[int, _Meeting], mesh: Mesh, axis_of: Mapping[str, str]) -> tuple[int, list[int]]:
    """Return a group all of whose ranks wait in it."""
    for rank, meeting in waiting.items():
        name = axis_of.get(meeting.group, meeting.group)
        if name not in mesh.names:
            raise LockstepError(f"rank {rank} waits in group {meeting.group!r}, which is no axis of {mesh}")
        axis = mesh.names.index(name)
        members = _members(mesh, rank, axis)
        if all(other in waiting and waiting[other].group == meeting.group for other in members):
            return axis, members
    stuck = "; ".join(f"rank {rank}: {m.name} in {m.group} ({m.node})" for rank, m in sorted(waiting.items()))
    raise LockstepError(f"no group is complete, the program hangs: {stuck}")


def _members(mesh: Mesh, rank: int, axis: int) -> list[int]:
    """Return the ranks that differ from `rank` along one axis at most, in order."""
    fixed = [index for i, index in enumerate(mesh.coordinate(rank)) if i != axis]
    ranks = itertools.product(*map(range, mesh.sizes))
    return [
        other for other, at in enumerate(ranks) if [index for i, index in enumerate(at) if i != axis] == fixed
    ]  # fmt: skip


def _collective(meetings: Sequence[_Meeting]) -> list[Any]:
    """Return each member's result."""
    first = meetings[0]
    plain = [[arg for arg in meeting.args if not _is_data(arg)] for meeting in meetings]
    splits = first.name == "all_to_all_single"
    # One rank may reduce in place what another, which reads it again, must not.
    kinds = {meeting.name.removesuffix("_") for meeting in meetings}
    if len(kinds) > 1 or (not splits and any(p != plain[0] for p in plain)):
        said = "; ".join(f"{m.name}{tuple(p)} ({m.node})" for m, p in zip(meetings, plain, strict=True))
        raise LockstepError(f"ranks of group {first.group} issue different collectives: {said}")
    shapes = [_shapes(meeting.args[0]) for meeting in meetings]
    if not splits and any(shape != shapes[0] for shape in shapes):
        raise LockstepError(f"ranks of group {first.group} meet in {first.name} with shapes {shapes}")
    if first.name.removesuffix("_").endswith("_coalesced"):
        kind = first.name.removesuffix("_").removesuffix("_coalesced")
        each = [
            _one(kind, [m.args[0][i] for m in meetings], [m.args for m in meetings])
            for i in range(len(first.args[0]))
        ]  # fmt: skip
        return [list(results) for results in zip(*each, strict=True)]
    return _one(first.name.removesuffix("_"), [m.args[0] for m in meetings], [m.args for m in meetings])


def _is_data(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) or (isinstance(arg, list | tuple) and any(map(_is_data, arg)))


def _shapes(arg: Any) -> Any:
    return [tuple(t.shape) for t in arg] if isinstance(arg, list | tuple) else tuple(arg.shape)


def _one(kind: str, data: Sequence[torch.Tensor], args: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    size = len(data)
    match kind:
        case "all_reduce":
            total = _reduced(data, args[0][1])
            return [total.clone() for _ in data]
        case "all_gather_into_tensor" | "all_gather_into_tensor_out":
            _check_size(args[0][1], size)
            whole = torch.cat([each.contiguous() for each in data])
            return [whole.clone() for _ in data]
        case "reduce_scatter_tensor":
            _check_size(args[0][2], size)
            return [part.clone() for part in _reduced(data, args[0][1]).chunk(size)]
        case "all_to_all_single":
            pieces = [torch.split(each, list(given[2])) for each, given in zip(data, args, strict=True)]
            results = [torch.cat([pieces[source][rank] for source in range(size)]) for rank in range(size)]
            for rank, (result, given) in enumerate(zip(results, args, strict=True)):
                if result.shape[0] != sum(given[1]):
                    raise LockstepError(f"rank {rank} of an all_to_all expects {given[1]} and gets {result.shape[0]}")
            return results
        case "broadcast":
            return [data[args[0][1]].clone() for _ in data]
    raise LockstepError(f"{kind} is no collective that this runner knows")


def _check_size(said: int, size: int) -> None:
    if said != size:
        raise LockstepError(f"a collective says its group has {said} ranks; it has {size}")


def _reduced(data: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    stacked = torch.stack([each.contiguous() for each in data])
    match reduce.lower():
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0)
    raise LockstepError(f"{reduce!r} is no reduction that this runner knows")


def _log(meeting: _Meeting, axis: int, result: Any) -> Issued:
    name = meeting.name.removesuffix("_").removesuffix("_coalesced").removesuffix("_single")
    name = name.removesuffix("_into_tensor").removesuffix("_tensor")
    reduce = meeting.args[1] if name in {"all_reduce", "reduce_scatter"} else ""
    return Issued(name, axis, max(_bytes(meeting.args[0]), _bytes(result)), reduce)


def _bytes(value: Any) -> int:
    tensors = value if isinstance(value, list | tuple) else [value]
    return sum(each.numel() * each.element_size() for each in tensors)
