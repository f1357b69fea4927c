"""When collectives are issued and when they are waited for; values do not change.

All ranks run the same passes on programs of equal form, so all issue the
collectives of a group in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.plan import Ahead
from autopar.ir.roles import LAST_STEPS
from autopar.rewrite.marks import COLLECTIVES, mark, role


@dataclass(frozen=True, slots=True)
class IssueEarly:
    """Move each reduction or exchange, with the copies that prepare it, to just behind what makes its input.

        mm(a, b)  mm(c, d)  reduce  wait  add(reduced, e)
    becomes
        mm(a, b)  reduce  mm(c, d)  wait  add(reduced, e)

    Gathers stay where they are first read: they make memory, so `PrefetchGathers` says when they are issued.
    A gradient's own slice is cut at once, so that the rest of it is freed.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        moved = 0
        for start in list(gm.graph.nodes):
            cut = role(start) == "move" and mark(start).gradient and not _follows_wait(start)
            reduction = role(start) == "start" and COLLECTIVES[start.target] != "all_gather"
            for node in preparation(start) if cut or reduction else ():
                latest = max(node.all_input_nodes)
                if latest.op != "placeholder" and latest.next is not node:
                    latest.append(node)
                    moved += 1
        return moved


@dataclass(frozen=True, slots=True)
class SinkWaits:
    """Move every wait, and the copies that follow it, to just before the first use of what it waits for.

    So are the casts and views that make a parameter's gradient of a reduced one: nothing else waits for those.

        gather  wait  mm(a, b)  mm(c, gathered)
    becomes
        gather  mm(a, b)  wait  mm(c, gathered)

    Values and their order of use are unchanged; only the moment the compute
    stream blocks moves later.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        moved = 0
        for node in reversed(list(gm.graph.nodes)):
            follows = (role(node) == "move" or _finishes(node)) and _follows_wait(node)
            if not (role(node) == "wait" or follows) or not node.users:
                continue
            first_use = min(node.users)
            if first_use is not node.next:
                first_use.prepend(node)
                moved += 1
        return moved


@dataclass(frozen=True, slots=True)
class SettleScatters:
    """Wait for each scattered gradient once as many bytes of its mesh axis are issued behind it, not at the end.

        scatter1 mm(a, b) scatter2 mm(c, d) wait1 wait2
    becomes
        scatter1 mm(a, b) scatter2 wait1 mm(c, d) wait2

    Until it is waited for, a collective holds what it reads: the whole gradient of one rank's part of the batch. As
    much is left to run behind the operators that follow; a small one would else have a large one waited for at once.
    They end in the order in which they are issued.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        pending: dict[str, list[fx.Node]] = {}
        behind: dict[fx.Node, int] = {}
        moved = 0
        for start in list(gm.graph.nodes):
            if role(start) != "start" or COLLECTIVES[start.target] != "reduce_scatter" or not _leaves(start):
                continue
            before = pending.setdefault(str(start.args[-1]), [])
            for each in before:
                behind[each] += _scattered_bytes(start)
            place = start
            while before and behind[before[0]] >= _scattered_bytes(before[0]):
                for node in _results(before.pop(0)):
                    if place < node and not any(place < each for each in node.all_input_nodes):
                        place.append(node)
                        place = node
                        moved += 1
            before.append(start)
            behind[start] = 0
        return moved


def _scattered_bytes(start: fx.Node) -> int:
    value = start.meta["val"]
    return sum(each.nbytes for each in (value if isinstance(value, list | tuple) else (value,)))


def _leaves(start: fx.Node) -> bool:
    """Return whether a collective makes nothing but what leaves the program."""
    found = _results(start)
    return all(user in found or user.op == "output" for node in (start, *found) for user in node.users)


def _results(start: fx.Node) -> list[fx.Node]:
    """Return the parts of a collective's result, the waits for them, and what brings them to their places, in order."""
    found = [start]
    for node in found:
        found += [
            user
            for user in node.users
            if user not in found
            and (user.target is operator.getitem or role(user) in {"wait", "move", "start"} or _finishes(user))
        ]
    return sorted(found[1:])


@dataclass(frozen=True, slots=True)
class PrefetchGathers:
    """Issue gathers of parameters before the use of those gathered before them, up to `ahead_bytes` early.

        gather1 wait1 use1 gather2 wait2 use2 gather3 wait3 use3
    becomes, with room for one,
        gather1 gather2 wait1 use1 gather3 wait2 use2 wait3 use3

    At least the next gather is issued early, so that it runs behind the use of the one before.
    """

    ahead_bytes: int

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        units = _units([n for n in gm.graph.nodes if role(n) == "start" and mark(n).gathers_parameter])
        held = [max(start.meta["val"].nbytes for start in unit) for unit in units]
        moved = 0
        for index in range(1, len(units)):
            target, ahead = index - 1, held[index] + held[index - 1]
            while target > 0 and ahead + held[target - 1] <= self.ahead_bytes:
                target -= 1
                ahead += held[target]
            for stage, start in enumerate(reversed(units[index])):
                # Over several axes: the inner gather waits for the outer one, which is issued earlier still.
                wait = min(units[max(target - stage, 0)][-1].users)
                for node in preparation(start):
                    if wait < node and all(each < wait for each in node.all_input_nodes):
                        wait.prepend(node)
                        moved += 1
        return moved


@dataclass(frozen=True, slots=True)
class IssueAhead:
    """Issue gathers of parameters where the plan says, ahead of their use.

    A gradient may be gathered on its way to where its parameter is, under the parameter's name: it has no such place.
    An operator that the program no longer has (a view that did nothing) is no place: that gather stays where it is.
    """

    ahead: tuple[Ahead, ...]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        first = _first_nodes(gm.graph)
        starts = {
            (str(node.args[-1]), mark(node).moves): node
            for node in gm.graph.nodes
            if role(node) == "start" and COLLECTIVES[node.target] == "all_gather" and not mark(node).gradient
        }
        moved = 0
        for each in self.ahead:
            start, place = starts.get((each.axis, each.tensor)), first.get(each.before)
            if start is None or place is None:
                continue
            for node in (*sorted(made_of(start)), start):
                if place < node:
                    place.prepend(node)
                    moved += 1
        return moved


@dataclass(frozen=True, slots=True)
class Defer:
    """Run operators later, with all that follows from them, where the plan says: beside a collective in flight.

        dw = mm(x, dy)  dx = mm(dy, w)  reduce(dx)  wait  mm(dx, v)
    becomes
        dx = mm(dy, w)  reduce(dx)  dw = mm(x, dy)  wait  mm(dx, v)

    Before no operator: at the end, where the last gradients are waited for.
    """

    deferred: Mapping[str, str]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators moved."""
        first = _first_nodes(gm.graph)
        (end,) = gm.graph.find_nodes(op="output")
        moved = 0
        for name, before in self.deferred.items():
            node, place = first.get(name), first.get(before) if before else end
            if node is None or place is None or place < node:
                continue
            for each in _following(node, place):
                place.prepend(each)
                moved += 1
        return moved


def _first_nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the first node that each operator of the captured program became."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and role(node) == "operator":
            found.setdefault(mark(node).origin, node)
    return found


def _following(node: fx.Node, place: fx.Node) -> list[fx.Node]:
    """Return a node and all that depends on it and runs before `place`, in order."""
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and user < place:
                found.add(user)
                todo.append(user)
    return sorted(found)


def made_of(start: fx.Node) -> set[fx.Node]:
    """Return the operators that a collective's input is made by."""
    found: set[fx.Node] = set()
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _units(starts: list[fx.Node]) -> list[list[fx.Node]]:
    """Return the gathers of each parameter, in the order in which they depend on each other."""
    units: list[list[fx.Node]] = []
    for start in starts:
        before = next((each for each in _reached(start) if role(each) == "start"), None)
        unit = next((unit for unit in units if before is not None and unit[-1] is before), None)
        if unit is not None:
            unit.append(start)
        else:
            units.append([start])
    return units


def _reached(start: fx.Node) -> list[fx.Node]:
    """Return the nodes behind a gather of a parameter, up to the gather before it."""
    found = [start]
    for node in found:
        if node is start or role(node) != "start":
            found += [each for each in node.all_input_nodes if each not in found]
    return found[1:]


def preparation(start: fx.Node) -> list[fx.Node]:
    """Return the copies, of parameters also the views and casts, that lead to a collective, and itself, in order."""
    found = [start]
    for node in found:
        for each in node.all_input_nodes:
            own = role(each) == "move" or (mark(start).gathers_parameter and each.op == "call_function")
            if own and role(each) not in {"wait", "start"} and not _follows_wait(each) and each not in found:
                found.append(each)
    return sorted(found)


def _follows_wait(node: fx.Node) -> bool:
    """Return whether a local copy, or the last cast of a gradient, belongs to the collective before it."""
    while (role(node) == "move" or _finishes(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return role(node) == "wait"


def _finishes(node: fx.Node) -> bool:
    """Return whether a node only casts or views what then leaves backward: a gradient on its last steps."""
    if str(node.target) not in LAST_STEPS or mark(node).phase != "backward" or len(node.all_input_nodes) != 1:
        return False
    return all(user.op == "output" or role(user) == "move" or _finishes(user) for user in node.users)
