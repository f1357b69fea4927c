"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.figures import format_bytes, format_change, format_degrees, format_seconds
from autopar.ir.plan import Collective, Plan
from autopar.report.outline import layout_text


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same in both plans."""

    kind: str
    """`workload`, `cluster`, `degrees`, `mesh`, `parameter`, `operator`, `collective`, `time`, `memory` or `bytes`."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        named = f"{self.kind} {self.name}" if self.name else self.kind
        return f"{named}: {self.before} -> {self.after}"


_ABSENT = "absent"


def differences(before: Plan, after: Plan) -> tuple[Difference, ...]:
    """Return what differs, the large before the small; none for plans that decide and predict the same."""
    return tuple(
        each for found in (_settings, _parameters, _operators, _collectives, _figures) for each in found(before, after)
    )


def diff_text(found: tuple[Difference, ...], limit: int = 40) -> str:
    """Return the differences a line each; of one kind no more than `limit`, then how many more."""
    if not found:
        return "the plans are the same\n"
    lines: list[str] = []
    by_kind: dict[str, list[Difference]] = {}
    for each in found:
        by_kind.setdefault(each.kind, []).append(each)
    for kind, each_kind in by_kind.items():
        lines += [str(each) for each in each_kind[:limit]]
        if len(each_kind) > limit:
            lines.append(f"{kind}: {len(each_kind) - limit} more differ")
    return "\n".join([*lines, ""])


def _settings(before: Plan, after: Plan) -> Iterator[Difference]:
    for field in ("model", "global_batch", "microbatch", "num_microbatches", "precision", "optimizer"):
        old, new = getattr(before.workload, field), getattr(after.workload, field)
        if old != new:
            yield Difference("workload", field, str(old), str(new))
    at_once = before.decisions.schedule.batch_overlap, after.decisions.schedule.batch_overlap
    if at_once[0] != at_once[1]:
        yield Difference("schedule", "micro-batches at once", *map(str, at_once))
    if before.cluster != after.cluster:
        yield Difference("cluster", "", _cluster(before), _cluster(after))
    if before.decisions.degrees != after.decisions.degrees:
        yield Difference(
            "degrees", "", format_degrees(before.decisions.degrees), format_degrees(after.decisions.degrees)
        )
    if before.decisions.mesh != after.decisions.mesh:
        yield Difference("mesh", "", _mesh(before), _mesh(after))


def _cluster(plan: Plan) -> str:
    return f"{plan.cluster.get('name', 'unnamed')} ({plan.fingerprint.cluster[:8]})"


def _mesh(plan: Plan) -> str:
    return " x ".join(f"{axis.name}={axis.size}@{axis.level}" for axis in plan.decisions.mesh.axes) or "none"


def _parameters(before: Plan, after: Plan) -> Iterator[Difference]:
    def show(plan: Plan, name: str) -> str:
        found = plan.decisions.parameters.get(name)
        if found is None:
            return _ABSENT
        gather = "" if found.gather == "none" else f", gathered {found.gather}"
        early = ", reduced each microbatch" if found.reduce == "microbatch" else ""
        return f"{layout_text(found.placements)}{gather}{early}"

    yield from _named("parameter", before.decisions.parameters, after.decisions.parameters, before, after, show)


def _operators(before: Plan, after: Plan) -> Iterator[Difference]:
    def show(plan: Plan, name: str) -> str:
        found = plan.decisions.operators.get(name)
        return _ABSENT if found is None else f"{found.target} {found.strategy}"

    yield from _named("operator", before.decisions.operators, after.decisions.operators, before, after, show)


def _named(
    kind: str,
    old: Mapping[str, object],
    new: Mapping[str, object],
    before: Plan,
    after: Plan,
    show: Callable[[Plan, str], str],
) -> Iterator[Difference]:
    for name in dict.fromkeys((*old, *new)):
        texts = show(before, name), show(after, name)
        if texts[0] != texts[1]:
            yield Difference(kind, name, *texts)


def _collectives(before: Plan, after: Plan) -> Iterator[Difference]:
    """Compare by operation, axis and phase: how many, how many bytes, how long."""
    old, new = _by_group(before), _by_group(after)
    for group in dict.fromkeys((*old, *new)):
        texts = [_traffic(each.get(group, ())) for each in (old, new)]
        if texts[0] != texts[1]:
            yield Difference("collective", " ".join(group), *texts)


def _by_group(plan: Plan) -> Mapping[tuple[str, str, str], tuple[Collective, ...]]:
    groups: dict[tuple[str, str, str], tuple[Collective, ...]] = {}
    for each in plan.decisions.collectives:
        key = each.op, each.axis, each.phase
        groups[key] = (*groups.get(key, ()), each)
    return groups


def _traffic(group: tuple[Collective, ...]) -> str:
    if not group:
        return _ABSENT
    count, moved = sum(each.count for each in group), sum(each.count * each.bytes for each in group)
    return f"{count} x, {format_bytes(moved)}, {format_seconds(sum(each.predicted_s for each in group))}"


def _figures(before: Plan, after: Plan) -> Iterator[Difference]:
    old, new = before.estimates, after.estimates
    times = [("step_time", old.step_time_s, new.step_time_s)]
    times += [
        (field.removesuffix("_s"), getattr(old.breakdown, field), getattr(new.breakdown, field))
        for field in ("compute_s", "exposed_communication_s", "bubble_s", "optimizer_s", "host_s")
    ]
    yield from _changed("time", times, format_seconds)
    memory = [("peak", old.peak_memory_bytes, new.peak_memory_bytes)]
    memory += [
        (field, getattr(old.memory, field), getattr(new.memory, field))
        for field in ("parameters", "gradients", "optimizer", "activations", "temporary", "reserved")
    ]
    yield from _changed("memory", memory, format_bytes)
    sent = ("communication", old.communication_bytes, new.communication_bytes)
    yield from _changed("bytes", [sent], format_bytes)


def _changed(
    kind: str, figures: list[tuple[str, float, float]] | list[tuple[str, int, int]], show: Callable[[float], str]
) -> Iterator[Difference]:
    for name, old, new in figures:
        if old != new:
            yield Difference(kind, name, show(old), f"{show(new)} ({format_change(old, new)})")
