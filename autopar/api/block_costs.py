"""What each block of a solved program costs as part of a pipeline stage: seconds and bytes of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from autopar.api.block_memory import BlockMemory
from autopar.costs.issued import Issued
from autopar.costs.liveness import local_bytes
from autopar.costs.optimizer import optimizer_seconds, state_bytes
from autopar.costs.outcome import Outcome
from autopar.costs.travelling import travelling
from autopar.ir import stages
from autopar.ir.graph import Op
from autopar.ir.roles import is_view, parameter_like
from autopar.ir.weight_gradients import weight_gradients
from autopar.search.stages import Unit

_Seconds = TypeVar("_Seconds")


class Ends(NamedTuple, Generic[_Seconds]):
    """Seconds of what each block's rank does once a step, and what could hide of them; or of all blocks of a rank."""

    reduce_s: _Seconds
    reduce_hidable_s: _Seconds
    gather_s: _Seconds
    gather_hidable_s: _Seconds
    step_s: _Seconds
    """The optimizer's."""


class Spent(NamedTuple):
    """Seconds of each block in a micro-batch, by part: `forward`, `backward`, `weights`."""

    seconds: Mapping[str, list[float]]
    waiting: Mapping[str, list[float]]
    """Of these, what takes no core: collectives, and a host that is behind."""

    host_s: list[float]
    """Of all parts, how long the device waits for its host."""


@dataclass
class BlockCosts:
    """The blocks of a program, priced for one micro-batch on one stage's mesh."""

    outcome: Outcome
    paths: list[str]
    of: Mapping[str, int]
    """The block of every operator."""

    def __post_init__(self) -> None:
        self.graph = self.outcome.graph

    @cached_property
    def _apart(self) -> frozenset[str]:
        return weight_gradients(self.graph, self.of)

    @cached_property
    def _spent(self) -> Spent:
        count = len(self.paths)
        seconds = {part: [0.0] * count for part in ("forward", "backward", "weights")}
        behind, waiting = ({part: [0.0] * count for part in seconds} for _ in range(2))
        apart = self._apart
        known: dict[str, float] = {}
        launched = {part: [0] * count for part in seconds}
        for op in self.graph.ops:
            rep = self.graph.representative(op.name)
            if rep not in known:
                known[rep] = self.outcome.seconds(rep)
            part: str = "weights" if op.name in apart else op.phase
            seconds[part][self.of[op.name]] += known[rep]
            launched[part][self.of[op.name]] += op.kind == "call" and not is_view(op)
        for issued in self.outcome.messages():
            if not self._is_once(issued):
                late = bool(issued.readers) and apart.issuperset(issued.readers)
                part = "weights" if late else issued.phase
                hidden = self._hidden_s(issued)
                waiting[part][self.of[issued.at]] += self.outcome.links.message_s(issued.message) - hidden
                behind[part][self.of[issued.at]] += hidden
        host_s = [0.0] * count
        device, share = self.outcome.links.cluster.device, self.outcome.links.cluster.share
        for part, found in seconds.items():
            # What is priced is what ranks take while all compute; here, what one takes that has a core.
            work = [each * share for each in found]
            shown = [each + waits for each, waits in zip(work, waiting[part], strict=True)]
            # A block's gathers run behind the block before it, which is about as long; the host runs ahead of both.
            busy = [*map(max, shown, behind[part])]
            seconds[part] = [device.with_host_s(*each) for each in zip(busy, launched[part], strict=True)]
            more = [whole - each for whole, each in zip(seconds[part], busy, strict=True)]
            host_s = [each + further for each, further in zip(host_s, more, strict=True)]
            waiting[part] = [whole - each for whole, each in zip(seconds[part], work, strict=True)]
        return Spent(seconds, waiting, host_s)

    @cached_property
    def units(self) -> list[Unit]:
        """Return what each block costs."""
        (seconds, waiting, _), apart, count = self._spent, self._apart, len(self.paths)
        static = self.static
        memory = BlockMemory(self.outcome, self.of, count)
        saved, kept = memory.saved(), memory.kept(apart)
        together, later = memory.temporary(()), memory.temporary(apart)
        return [
            Unit(
                forward_s=seconds["forward"][at],
                input_gradient_s=seconds["backward"][at],
                weight_gradient_s=seconds["weights"][at],
                forward_waiting_s=waiting["forward"][at],
                input_gradient_waiting_s=waiting["backward"][at],
                weight_gradient_waiting_s=waiting["weights"][at],
                static_bytes=round(sum(static[at])),
                activation_bytes=round(saved[at]),
                kept_bytes=round(kept[at]),
                temporary_bytes=round(together[at]),
                temporary_apart_bytes=round(later[at]),
            )
            for at in range(count)
        ]

    @property
    def host_s(self) -> list[float]:
        """Return, of each block, how long the device waits for its host in a micro-batch; its seconds have it too."""
        return self._spent.host_s

    @cached_property
    def shown_s(self) -> list[float]:
        """Return, of each block, what shows of the collectives of one micro-batch; its seconds have them too."""
        found = [0.0] * len(self.paths)
        for issued in self.outcome.messages():
            if not self._is_once(issued):
                found[self.of[issued.at]] += self.outcome.links.message_s(issued.message) - self._hidden_s(issued)
        return found

    def _hidden_s(self, issued: Issued) -> float:
        """Return the part of a collective that computation runs behind, as the costs of the whole program have it."""
        return self.outcome.links.hidable_s(issued.message) if issued.overlapped else 0.0

    def _is_once(self, issued: Issued) -> bool:
        """Return whether a collective runs once a step, not for each micro-batch."""
        return issued.finishes or issued.times < self.outcome.microbatches

    def _bytes(self, op: Op) -> float:
        strategy = self.outcome.strategy(self.graph.representative(op.name))
        return sum(
            local_bytes(meta, layout, self.outcome.links.sizes)
            for meta, layout in zip(op.outputs, strategy.outputs, strict=True)
            if meta is not None
        )

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a rank's part of the batch, which the caller holds on every stage."""
        return round(sum(self._bytes(op) for op in self.graph.ops if op.kind == "input"))

    @cached_property
    def static(self) -> list[tuple[float, float, float]]:
        """Return the bytes of parameters, gradients and optimizer state of each block."""
        found = [(0.0, 0.0, 0.0)] * len(self.paths)
        gradients = {o.name: o.ref for o in self.graph.outputs if o.kind == "gradient" and o.ref is not None}
        for op in self.graph.ops:
            if op.kind not in {"parameter", "buffer"}:
                continue
            layout = self.outcome.layout(self.graph.representative(op.name))
            state = 0.0
            if op.kind == "parameter" and op.requires_grad:
                state = state_bytes(op, layout, self.outcome.links.sizes, self.outcome.optimizer)
            ref = gradients.get(op.name)
            gradient = 0.0
            if ref is not None:
                early = self.outcome.reduces_early(self.graph.representative(op.name))
                made_in = layout if early else self.outcome.layout(self.graph.representative(ref.op), ref.index)
                gradient = local_bytes(self.graph.meta(ref), made_in, self.outcome.links.sizes)
            # A tied parameter is held by each stage that reads it, and so is what is gathered of it.
            for at in {self.of[op.name], *(self.of[reader] for reader in self._readers(op.name))}:
                p, g, s = found[at]
                found[at] = (p + self._bytes(op), g + gradient, s + state)
        for issued in self.outcome.messages():
            if issued.times == 1 < self.outcome.microbatches and issued.message.op == "all_gather":
                p, g, s = found[self.of[issued.at]]
                found[self.of[issued.at]] = (p + issued.message.bytes, g, s)
        return found

    def _readers(self, name: str) -> Iterator[str]:
        """Yield the operators that read a parameter, as it is or viewed or cast: a view is made where it is read."""
        for user in self.graph.users[name]:
            if user in parameter_like(self.graph):
                yield from self._readers(user)
            else:
                yield user

    @cached_property
    def ends(self) -> Ends[list[float]]:
        """Return, of each block, what its rank does once a step."""
        found = Ends(*([0.0] * len(self.paths) for _ in Ends._fields))
        links = self.outcome.links
        # Frameworks differ in whether they reduce sums behind the last micro-batch.
        hides = links.hides_reductions or not links.flat_bytes
        once: dict[tuple[int, bool], list[Issued]] = {}
        for issued in self.outcome.messages():
            if self._is_once(issued):
                once.setdefault((self.of[issued.at], issued.finishes), []).append(issued)
        for (at, finishes), issues in once.items():
            for message in travelling(self.outcome, issues):
                taken, hidable = links.message_s(message), links.hidable_s(message)
                if finishes:
                    found.reduce_s[at] += taken
                    found.reduce_hidable_s[at] += hidable if hides else 0.0
                    renewal_s = links.renewal_s(message)
                    found.gather_s[at] += renewal_s
                    found.gather_hidable_s[at] += renewal_s * links.overlap(message.axis)
                else:
                    found.gather_s[at] += taken
                    found.gather_hidable_s[at] += 0.0 if links.flat_bytes else hidable
        for op in self.graph.ops:
            if op.kind == "parameter" and op.requires_grad:
                layout = self.outcome.layout(self.graph.representative(op.name))
                spent = optimizer_seconds(op, [layout], links.sizes, self.outcome.optimizer, links.cluster.device)
                found.step_s[self.of[op.name]] += float(spent[0])
        return found

    def exposed_s(self, blocks_of_rank: list[int]) -> float:
        """Return what shows of what a rank does once a step: what its first forward or last backward does not hide."""
        units = [self.units[at] for at in blocks_of_rank]
        once = Ends(*(sum(each[at] for at in blocks_of_rank) for each in self.ends))
        forward_s = sum(unit.forward_s for unit in units)
        backward_s = sum(unit.input_gradient_s + unit.weight_gradient_s for unit in units)
        return float(exposed_s(once, forward_s, backward_s))


def block_costs(outcome: Outcome) -> BlockCosts:
    """Return what the blocks of a program cost, worked out once and kept with it: many ways to run it are tried."""
    kept = vars(outcome)  # where `cached_property` keeps its values, too
    if _KEPT not in kept:
        paths = [unit.path for unit in stages.units(outcome.graph)]
        kept[_KEPT] = BlockCosts(outcome, paths, stages.homes(outcome.graph))
    found: BlockCosts = kept[_KEPT]
    return found


_KEPT = "autopar.api.block_costs"


def exposed_s(once: Ends[Any], forward_s: Any, backward_s: Any) -> Any:
    """Return what shows of what ranks do once a step, all of their blocks taken together: a number or an array."""
    reduces_s = once.reduce_s - np.minimum(once.reduce_hidable_s, backward_s)
    return reduces_s + once.gather_s - np.minimum(once.gather_hidable_s, forward_s)
