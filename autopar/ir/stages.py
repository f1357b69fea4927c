"""Pipeline stages of a program: its blocks in the order they run, and the stage of every operator once it is cut.

Forward operators are cut in program order, so that values only ever flow to the
same or a later stage; a frozen branch that is built like a trained one is cut where that is. Backward operators belong
to the stage of the forward operator they come from, and gradients only ever flow to the same or an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Graph, Op, behind, once_per_graph
from autopar.ir.parameter_rows import parameter_rows, read_parameters
from autopar.ir.roles import is_view, parameter_like
from autopar.ir.twins import Twin, branch, lies_in, twins
from autopar.suggest import did_you_mean

_LARGE, _WHOLE = 1 / 8, 0.9
"""Share of the operators above which a block is cut if it is a row of blocks itself; how much of it those must hold."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of the model that no cut into stages splits, with what runs behind it up to the next one."""

    path: str
    """Of its module."""

    ops: tuple[str, ...]
    """Forward operators, in program order."""

    parameters: tuple[str, ...]
    """Names of the parameters that they read; one that several units read is in each."""


@once_per_graph
def units(graph: Graph) -> tuple[Unit, ...]:
    """Return the blocks between which the program may be cut, in program order: at least one.

    They are the children of module lists (`model.layers.7`), of the outer ones where lists are nested; without lists,
    the innermost modules that hold parameters, and the parameters of lists (`weights.7`). Blocks between what reads a
    buffer and what gives it its new value are one. Operators of no block belong to the block running before them, those
    before the first block to the first. Blocks of a frozen branch that is built like a trained one (a teacher beside
    its student) belong to their counterparts.
    """
    followers = [twin.frozen for twin in _twins(graph)]
    starts = _starts(graph, _block_paths(graph))
    own = [path for path in starts if not any(lies_in(path, frozen) for frozen in followers)]
    paths = _apart(graph, sorted(own, key=starts.__getitem__) or [""])
    members: list[list[str]] = [[] for _ in paths]
    found = _forward_stages(graph, [[path] for path in paths])
    _add_backward(graph, found)
    for op in graph.ops:
        if _runs(op):
            members[found[op.name]].append(op.name)
    return tuple(Unit(path, tuple(ops), _parameters(graph, ops)) for path, ops in zip(paths, members, strict=True))


def _apart(graph: Graph, paths: Sequence[str]) -> list[str]:
    """Return those of the blocks before which a cut leaves what reads a buffer with what gives it its new value.

    A buffer has one value at a time, that of its stage: a module that runs twice and keeps a running vector
    (spectral norm) is cut neither in itself nor between its runs. What stages make for themselves is no matter.
    """
    found = _forward_stages(graph, [[path] for path in paths])
    shared = everywhere(graph)
    held: set[int] = set()
    for name, made in _updates(graph).items():
        read = [found[user] for user in graph.users.get(name, ()) if user in found]
        if made in found and made not in shared and read:
            held.update(range(min(read) + 1, found[made] + 1))
    return [path for at, path in enumerate(paths) if at not in held]


def _updates(graph: Graph) -> dict[str, str]:
    """Return the operators that make the new values of buffers, by the buffers' own."""
    return {each.name: each.ref.op for each in graph.outputs if each.kind == "mutation" and each.ref is not None}


def stage_of(graph: Graph, blocks: Sequence[Sequence[str]]) -> Mapping[str, int]:
    """Return the stage of every operator, parameter, buffer, input, constant and tangent.

    `blocks[i]` are the module paths of stage i, as a plan stores them; what lies below a path belongs to it. A block
    that is not named runs in the stage of the block before it. What several stages read has the first of them.

    Raises:
        UsageError: a path names no module of the program, is named twice, or runs before a path of an earlier stage.
        InfeasibleError: more stages than blocks.
    """
    _check(graph, blocks)
    found = _forward_stages(graph, blocks)
    _add_backward(graph, found)
    _add_starts(graph, blocks, found)
    return found


@once_per_graph
def homes(graph: Graph) -> Mapping[str, int]:
    """Return the place among `units` of every operator, parameter, buffer, input, constant and tangent."""
    found = units(graph)
    if len(found) == 1:
        return dict.fromkeys((op.name for op in graph.ops), 0)
    return stage_of(graph, [[unit.path] for unit in found])


def too_many_stages(stages: int, found: Sequence[Unit], interleave: int = 1) -> InfeasibleError:
    """Return the error about a cut into more stages than the model has blocks; each rank has `interleave` of them."""
    names = [unit.path or "the model itself" for unit in found]
    shown = ", ".join(names if len(names) <= 4 else [names[0], names[1], "...", names[-1]])
    each = f" ({stages // interleave} ranks of {interleave})" if interleave > 1 else ""
    blocks = f"{len(found)} block{'s' if len(found) != 1 else ''}"
    most = f"--fix pp={len(found)}" if interleave == 1 else f"{len(found)} (pp x interleave)"
    return InfeasibleError(
        f"{stages} pipeline stages{each}, and the model has {blocks} to cut between ({shown}); "
        f"use at most {most}, or put the layers into a torch.nn.ModuleList"
    )


@once_per_graph
def _block_paths(graph: Graph) -> tuple[str, ...]:
    holders = {path for op in graph.ops if op.kind == "parameter" for path in _holders(graph, op)}
    modules = [op.module for op in graph.ops if _runs(op)]
    blocks = _rows(graph, holders)
    if blocks:
        return tuple(blocks)
    used = {path for path in holders if any(lies_in(module, path) for module in modules)}
    used |= parameter_rows(graph)
    return tuple(sorted(path for path in used if not any(path != q and lies_in(q, path) for q in used)))


def _rows(graph: Graph, holders: Iterable[str], below: str = "") -> list[str]:
    """Return the children of the outermost module lists below a path; large ones are cut further where possible."""
    inside = [path for path in holders if lies_in(path, below)]
    depth = len(below.split(".")) if below else 0
    rows: dict[str, set[str]] = {}
    for path in inside:
        parts = path.split(".")
        for at in range(depth, len(parts)):
            if parts[at].isdigit():
                rows.setdefault(".".join(parts[:at]), set()).add(".".join(parts[: at + 1]))
    rows = {row: children for row, children in rows.items() if len(children) > 1}
    outer = [row for row in rows if not any(row != r and lies_in(row, r) for r in rows)]
    forward = [op for op in graph.ops if _runs(op)]
    found: list[str] = []
    for child in sorted(child for row in outer for child in rows[row]):
        own = [op.module for op in forward if lies_in(op.module, child)]
        inner = _rows(graph, inside, child) if len(own) > _LARGE * len(forward) else []
        covered = sum(any(lies_in(module, block) for block in inner) for module in own)
        whole = covered >= _WHOLE * len(own) and _is_row(graph, inner)
        found += inner if inner and whole else [child] if own else []
    return found


def _is_row(graph: Graph, blocks: Sequence[str]) -> bool:
    """Return whether blocks run one after the other, each on what the one before made; experts run side by side."""
    starts = _starts(graph, blocks)
    order = sorted(starts, key=starts.__getitem__)
    return all(_feeds(graph, before, block) for before, block in pairwise(order))


def _feeds(graph: Graph, before: str, block: str) -> bool:
    reached: set[str] = set()
    for op in graph.ops:
        if _runs(op):
            read = any(ref.op in reached for ref in op.refs)
            if read and lies_in(op.module, block):
                return True
            if read or (lies_in(op.module, before) and op.name not in everywhere(graph)):
                reached.add(op.name)
    return False


def _starts(graph: Graph, paths: Iterable[str]) -> dict[str, int]:
    """Return the position at which each block first runs: its first operator that computes with parameters.

    Masks and views may be made far ahead.
    """
    known = set(paths)
    shared = everywhere(graph)
    visible = _visible(graph)
    found: dict[str, int] = {}
    for op in graph.ops:
        if _runs(op) and op.name in visible and op.name not in shared:
            path = _longest(op.module, known)
            if path is not None:
                found.setdefault(path, graph.position[op.name])
    rows = known & parameter_rows(graph)
    for name, read in read_parameters(graph).items():
        if rows and name in visible and name not in shared and _runs(graph.by_name[name]):
            for path in read & rows:
                found.setdefault(path, graph.position[name])
    return found


@once_per_graph
def everywhere(graph: Graph) -> frozenset[str]:
    """Return what any stage may have for itself: operators that read no parameter, or only view or cast one.

    Parameters, buffers, inputs, constants and tangents are among them.
    """
    free: set[str] = set()
    for op in graph.ops:
        given = op.kind in {"buffer", "input", "constant"}
        if given or (op.kind == "call" and all(ref.op in free for ref in op.refs)):
            free.add(op.name)
    return frozenset(free | parameter_like(graph) | {op.name for op in graph.ops if op.kind == "tangent"})


def _check(graph: Graph, blocks: Sequence[Sequence[str]]) -> None:
    if len(blocks) == 1 and not blocks[0]:
        return
    found = units(graph)
    empty = [stage for stage, paths in enumerate(blocks) if not paths]
    if not blocks or empty:
        if len(blocks) > len(found):
            raise too_many_stages(len(blocks), found)
        raise UsageError(
            f"stage {empty[0] if empty else 0} of {len(blocks)} has no blocks; name at least one module path"
        )
    flat = [path for paths in blocks for path in paths]
    doubled = next((path for place, path in enumerate(flat) if path in flat[:place]), None)
    if doubled is not None:
        raise UsageError(f"block {doubled!r} is named in two places; each block has one stage")
    known = _known_paths(graph)
    for path in flat:
        if path not in known:
            close = did_you_mean(path, [unit.path for unit in found]) or did_you_mean(path, known)
            raise UsageError(f"no module {path!r} in the program{close}; its blocks are {_shown(found)}")
    if any(each.kind == "gradient" and each.ref is not None for each in graph.outputs):
        _check_order(graph, blocks)  # evaluation may go another way: its stages are lent what they have not


def _check_order(graph: Graph, blocks: Sequence[Sequence[str]]) -> None:
    starts = _starts(graph, [path for paths in blocks for path in paths])
    used = [[path for path in paths if path in starts] for paths in blocks]
    for (before, earlier), (stage, later) in pairwise((i, paths) for i, paths in enumerate(used) if paths):
        last, first = max(earlier, key=starts.__getitem__), min(later, key=starts.__getitem__)
        if starts[first] < starts[last]:
            raise UsageError(
                f"block {first!r} of stage {stage} runs before block {last!r} of stage {before}; "
                f"stages follow the order in which blocks run: {_shown(units(graph))}"
            )


def _known_paths(graph: Graph) -> set[str]:
    """Return the paths of all modules that run or hold parameters, their parents included."""
    modules = {op.module for op in graph.ops if op.kind == "call"}
    modules |= {path for op in graph.ops if op.kind in {"parameter", "buffer"} for path in _holders(graph, op)}
    modules |= parameter_rows(graph)
    return {".".join(m.split(".")[:n]) for m in modules for n in range(1, len(m.split(".")) + 1)} | {""}


def _shown(found: Sequence[Unit]) -> str:
    names = [repr(unit.path) for unit in found]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-2:]])


def _forward_stages(graph: Graph, blocks: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the stage of each operator that an output depends on: of the block running then, the last one to start."""
    stages = {path: stage for stage, paths in enumerate(blocks) for path in paths}
    begins = {at: stages[path] for path, at in _starts(graph, stages).items()}
    visible = _visible(graph)
    current = 0
    found: dict[str, int] = {}
    for op in graph.ops:
        if _runs(op) and op.name in visible:
            current = max(current, begins.get(graph.position[op.name], current))
            found[op.name] = current
    followers = [twin for twin in _twins(graph) if not any(lies_in(path, twin.frozen) for path in stages)]
    for twin in followers:
        _follow(graph, twin, stages, found)
    if followers:
        _settle(graph, found)
    return found


@once_per_graph
def _twins(graph: Graph) -> tuple[Twin, ...]:
    """Return the frozen branches whose blocks run on the stages of another branch's blocks."""
    paths = _block_paths(graph)
    return twins(graph, _starts(graph, paths), _computed(graph))


def _computed(graph: Graph) -> frozenset[str]:
    """Return the forward operators that run on one stage only."""
    runs = frozenset(op.name for op in graph.ops if _runs(op))
    return (runs & _visible(graph)) - everywhere(graph)


def _follow(graph: Graph, twin: Twin, stages: Mapping[str, int], found: dict[str, int]) -> None:
    """Give the operators of a frozen branch the stages of their counterparts: of the block running then."""
    blocks = [path for path in stages if lies_in(path, twin.trained)]
    begins = _starts(graph, [twin.frozen + path[len(twin.trained) :] for path in blocks])
    own = {at: stages[twin.trained + path[len(twin.frozen) :]] for path, at in begins.items()}
    computed = _computed(graph)
    members = branch(graph, twin.frozen, computed)
    beside = (found[op.name] for op in graph.ops if op.name in computed and lies_in(op.module, twin.trained))
    current = min(beside, default=0)
    for op in graph.ops:
        if op.name in members:
            current = max(current, own.get(graph.position[op.name], current))
            found[op.name] = current


def _settle(graph: Graph, found: dict[str, int]) -> None:
    """Move operators so that values flow to the same or a later stage.

    What any stage may have for itself goes to the first that reads it, all else to the last that it reads from.
    """
    shared = everywhere(graph)
    for op in reversed(graph.ops):
        if op.name in found and op.name in shared:
            found[op.name] = min(
                (found[user] for user in graph.users[op.name] if user in found), default=found[op.name]
            )
    for op in graph.ops:
        if op.name in found:
            found[op.name] = max((found[op.name], *(found.get(ref.op, 0) for ref in op.refs)))


@once_per_graph
def _visible(graph: Graph) -> frozenset[str]:
    """Return what the program's outputs and the buffers' new values depend on."""
    todo = [each.ref.op for each in graph.outputs if each.ref is not None and each.kind != "gradient"]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [ref.op for ref in graph.by_name[name].refs]
    return frozenset(found)


@once_per_graph
def _gradients(graph: Graph) -> frozenset[str]:
    """Return what depends on a tangent."""
    return behind(graph, "tangent")


def _add_backward(graph: Graph, found: dict[str, int]) -> None:
    """Add the operators that no output depends on.

    Gradients go to the stage of their module, so far as they then flow to earlier stages only. What depends on no
    gradient (derivatives computed ahead, layers run again) goes there so far as it then flows to later stages only.
    """
    shared, gradients = everywhere(graph), _gradients(graph)
    last = max(found.values(), default=0)
    places, present = _places(graph, found), _present(graph, found)
    for op in graph.ops:
        if op.kind != "call" or op.name in found:
            continue
        at = places[is_view(op)]
        own = at.get((op.module, op.source)) or at.get((op.module, None)) or frozenset(range(last + 1))
        reads = [ref.op for ref in op.refs if ref.op not in shared]
        saved = [name for name in reads if name not in gradients]
        behind = [found[name] for name in reads if name in gradients]
        low, high = max((found[name] for name in saved), default=0), min(behind, default=last)
        fit = [stage for stage in own if low <= stage <= high]
        if op.name not in gradients:
            found[op.name] = min(fit, default=low)
        elif (op.target == "aten.add.Tensor" and len(behind) > 1) or _takes_part(graph, op):
            # What makes less of what it reads runs before that travels: the gradients that several stages have of one
            # value are added up, not each sent by itself.
            found[op.name] = high
        else:
            # Where several fit, the last one that has all it reads of forward.
            handy = [stage for stage in fit if all(stage in present.get(n, {found[n]}) for n in saved)]
            found[op.name] = min(max(handy) if handy else min(fit, default=max(low, *own)), high)


def _takes_part(graph: Graph, op: Op) -> bool:
    """Return whether an operator only takes a part of the one value that it reads."""
    if not is_view(op) or len(op.refs) != 1:
        return False
    made = sum(prod(meta.shape) for meta in op.outputs if meta is not None)
    return made < prod(graph.meta(op.refs[0]).shape)


def _places(graph: Graph, found: Mapping[str, int]) -> dict[bool, dict[tuple[str, str | None], frozenset[int]]]:
    """Return the stages of the forward operators of each module and source line, and of each module.

    For what is no view, views count where there is nothing else: they may stand far from what they belong to. What is
    one may be the gradient of any: `self.head(torch.cat(...)).squeeze()` is a line of two stages.
    """
    shared = everywhere(graph)
    places: dict[bool, dict[tuple[str, str | None], set[int]]] = {True: {}, False: {}}
    for op in graph.ops:
        if op.name in found and op.name not in shared:
            for key in ((op.module, op.source), (op.module, None)):
                places[is_view(op)].setdefault(key, set()).add(found[op.name])
    views, others = places[True], places[False]
    either = {key: views.get(key, set()) | others.get(key, set()) for key in {**views, **others}}
    return {
        viewing: {key: frozenset(stages) for key, stages in found.items()}
        for viewing, found in ((True, either), (False, {**views, **others}))
    }


def _present(graph: Graph, found: Mapping[str, int]) -> dict[str, set[int]]:
    """Return, for each forward operator, the stages whose forward makes or reads its value."""
    present = {name: {stage} for name, stage in found.items()}
    for op in graph.ops:
        if op.name in found:
            for ref in op.refs:
                present.setdefault(ref.op, set()).add(found[op.name])
    return present


def _add_starts(graph: Graph, blocks: Sequence[Sequence[str]], found: dict[str, int]) -> None:
    """Add what programs start from: to the first stage that reads it; tangents to the last.

    What is unread is where it gets its new value (the directions of a spectral norm), else where its path is.
    """
    views = parameter_like(graph)
    updates = _updates(graph)
    stages_of_paths = {path: stage for stage, paths in enumerate(blocks) for path in paths}
    first: dict[str, int] = {}
    for op in reversed(graph.ops):
        users = graph.users[op.name]
        if op.kind == "call" and op.name not in views:
            first[op.name] = found[op.name]
            continue
        stages = [first[user] for user in users if user in first]
        if op.kind == "tangent":
            found[op.name] = max(stages, default=0)
        elif stages:
            first[op.name] = min(stages)
        elif op.kind == "call":
            first[op.name] = found[op.name]
        if op.kind not in {"call", "tangent"}:
            path = _longest(op.target.rpartition(".")[0], set(stages_of_paths))
            unread = found.get(updates.get(op.name, ""), stages_of_paths.get(path or "", 0))
            found[op.name] = first.get(op.name, unread)


def _parameters(graph: Graph, ops: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the parameters that operators read, through views and casts too."""
    views = parameter_like(graph)
    found: dict[str, None] = {}
    pending = [ref.op for name in reversed(ops) for ref in reversed(graph.by_name[name].refs) if name not in views]
    while pending:
        op = graph.by_name[pending.pop()]
        if op.name in views:
            pending += [ref.op for ref in op.refs]
            if op.kind == "parameter":
                found[op.target] = None
    return tuple(found)


def _holders(graph: Graph, op: Op) -> list[str]:
    """Return the modules that hold a parameter, one for each of its tied names."""
    return [name.rpartition(".")[0] for name in graph.aliases.get(op.target, (op.target,))]


def _runs(op: Op) -> bool:
    return op.kind == "call" and op.phase == "forward"


def _longest(module: str, known: set[str]) -> str | None:
    """Return the innermost of the known paths that a module lies in."""
    parts = module.split(".") if module else []
    for count in range(len(parts), -1, -1):
        path = ".".join(parts[:count])
        if path in known:
            return path
    return None
