"""A plan as tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.figures import format_bytes, format_degrees, format_seconds
from autopar.ir.plan import Collective, Plan
from autopar.ir.timeline import Timeline
from autopar.report.outline import (
    MEMORY_PARTS,
    costly_operators,
    has_unlike_stages,
    layout_text,
    parameter_groups,
    settled,
    summary,
    time_parts,
)
from autopar.report.schedule_picture import schedule_picture

_NAMED = 4
"""Blocks of one way whose paths are printed."""

_TOP = 12
"""Rows of a table that could have thousands."""

_PIPE_WIDTH = 160
"""Columns where the output is no terminal: wide enough that names are not cut."""

_MARGIN = len("rank 9999    bubble 100%")
"""Columns of the picture of a schedule beside those of time."""

Row = Sequence[str]

_STAGE_HEADS: Row = ("stage", "ranks", "blocks", ">forward", ">input grad", ">weight grad", ">busy", ">peak")
"""Seconds of one micro-batch, and of the whole step."""


def table_text(plan: Plan, width: int = _PIPE_WIDTH, timeline: Timeline | None = None) -> str:
    """Return the tables as plain text; with the timeline of a plan's pipeline, a picture of it too."""
    out = StringIO()
    _print(plan, Console(file=out, width=width, color_system=None, highlight=False), timeline)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_table(plan: Plan, stream: TextIO, timeline: Timeline | None = None) -> None:
    """Write the tables to a stream, coloured where it is a terminal and `NO_COLOR` is not set."""
    if not stream.isatty():
        stream.write(table_text(plan, timeline=timeline))
        return
    _print(plan, Console(file=stream, highlight=False), timeline, whole=False)


def _print(plan: Plan, console: Console, timeline: Timeline | None, *, whole: bool = True) -> None:
    """Print the tables; text between them is folded at words at the console's width, or left in whole lines."""
    workload = plan.workload
    pieces = "micro-batches" if workload.num_microbatches > 1 else "micro-batch"
    at_once = ", two at once" if plan.decisions.schedule.batch_overlap > 1 else ""
    batch = f"batch {workload.global_batch}, {workload.num_microbatches} {pieces} of {workload.microbatch}{at_once}"
    console.print(
        Text(f"{settled(workload)}  {batch}, {workload.precision}, {workload.optimizer}", style="bold"),
        soft_wrap=whole,
    )
    console.print(
        Text(f"{format_degrees(plan.decisions.degrees)} on {plan.cluster.get('name', 'the cluster')}"),
        soft_wrap=whole,
    )
    for title, heads, rows in _sections(plan):
        found = list(rows)
        if found:
            console.print()
            console.print(_table(title, heads, found))
        if timeline is not None and heads[0] == _STAGE_HEADS[0]:
            console.print(Text(f"\n{schedule_picture(timeline, console.width - _MARGIN)}", end=""), soft_wrap=whole)
    for warning in plan.warnings:
        place = f" ({warning.location})" if warning.location else ""
        console.print(Text(f"\nwarning: {warning.text}{place} [{warning.code}]", style="yellow"), soft_wrap=whole)
    console.print()
    console.print(Text(summary(plan), style="bold"), soft_wrap=whole)


def _table(title: str, heads: Row, rows: Iterable[Row]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False, header_style="dim"
    )
    for head in heads:
        table.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _sections(plan: Plan) -> Iterator[tuple[str, Row, Iterable[Row]]]:
    """Yield title, heads (`>`: figures, to the right) and rows of each table."""
    axes = plan.decisions.mesh.axes
    names = f" ({' '.join(plan.decisions.mesh.names)})" if axes else ""
    yield "mesh", ("axis", ">size", "level"), ((axis.name, str(axis.size), axis.level) for axis in axes)
    heads = ("stage", "ranks", "devices", *_STAGE_HEADS[2:]) if has_unlike_stages(plan) else _STAGE_HEADS
    yield f"stages ({plan.decisions.schedule.name})", heads, _stage_rows(plan)
    yield "recomputation in backward", ("way", ">blocks", "which"), _recompute_rows(plan)
    yield "time of a step", ("part", ">seconds", ">share"), _time_rows(plan)
    yield "memory of a device", ("part", ">bytes", ">share"), _memory_rows(plan)
    yield f"parameters{names}", ("name", ">count", "shape", "placements", "gather"), _parameter_rows(plan)
    yield (
        f"operators by time{names}",
        ("operator", "target", "module", ">count", "strategy", ">time"),
        _operator_rows(plan),
    )
    yield (
        "collectives",
        ("collective", "axis", "level", ">message", ">count", "phase", "tensor", "overlapped", ">time"),
        _collective_rows(plan),
    )
    yield "search", ("status", ">objective", ">bound", ">gap", ">candidates", ">seed"), _solver_rows(plan)
    yield "alternatives", ("degrees", ">step", ">peak", "why not"), _alternative_rows(plan)


def _stage_rows(plan: Plan) -> Iterator[Row]:
    """Yield a row a pipeline stage; none for one SPMD program."""
    if len(plan.decisions.stages) < 2:
        return
    predicted = {each.index: each for each in plan.estimates.per_stage}
    for stage in plan.decisions.stages:
        ranks, paths = stage.ranks, stage.blocks
        shown = [f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in (ranks, paths) if each]
        found = predicted.get(stage.index)
        figures = ["-"] * 5
        if found:
            parts = (found.forward_s, found.input_gradient_s, found.weight_gradient_s, found.step_time_s)
            figures = [*map(format_seconds, parts), format_bytes(found.peak_memory_bytes)]
        devices = (found.devices,) if found and has_unlike_stages(plan) else ()
        yield str(stage.index), shown[0], *devices, shown[-1], *figures


def _recompute_rows(plan: Plan) -> Iterator[Row]:
    """Yield a row a way of recomputing blocks; none where nothing runs again."""
    ways: dict[str, list[str]] = {}
    for path, way in plan.decisions.recompute.items():
        ways.setdefault(way, []).append(path)
    for way, paths in sorted(ways.items()):
        every = paths == ["*"]
        shown = ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
        yield way, "all" if every else str(len(paths)), "" if every else shown


def _time_rows(plan: Plan) -> Iterator[Row]:
    total = plan.estimates.step_time_s
    for name, seconds in (*time_parts(plan.estimates.breakdown), ("step", total)):
        yield name, format_seconds(seconds), f"{seconds / total:.1%}" if total else "-"


def _memory_rows(plan: Plan) -> Iterator[Row]:
    estimates = plan.estimates
    budget = estimates.memory_budget_bytes
    parts = [(name, getattr(estimates.memory, name)) for name in MEMORY_PARTS]
    for name, count in (*parts, ("peak", estimates.peak_memory_bytes), ("budget", budget)):
        yield name, format_bytes(count), f"{count / budget:.1%}" if budget else "-"


def _parameter_rows(plan: Plan) -> Iterator[Row]:
    groups = parameter_groups(plan)
    for each in groups[:_TOP]:
        shape = str(each.meta) if each.meta else "-"
        yield each.name, str(each.count), shape, layout_text(each.decision.placements), each.decision.gather
    if len(groups) > _TOP:
        yield f"... and {len(groups) - _TOP} more", "", "", "", ""


def _operator_rows(plan: Plan) -> Iterator[Row]:
    found = costly_operators(plan)
    for name, each in found[:_TOP]:
        total = format_seconds(each.predicted_s * each.instances)
        yield name, each.target, each.module, str(each.instances), str(each.strategy), total
    if len(found) > _TOP:
        yield f"... and {len(found) - _TOP} more", "", "", "", "", ""


def _collective_rows(plan: Plan) -> Iterator[Row]:
    found = sorted(plan.decisions.collectives, key=lambda each: -each.predicted_s)
    for each in found[:_TOP]:
        yield (
            each.op,
            each.axis,
            _crossed(each),
            format_bytes(each.bytes),
            str(each.count),
            each.phase,
            each.tensor,
            "yes" if each.overlapped else "no",
            format_seconds(each.predicted_s),
        )
    if len(found) > _TOP:
        yield f"... and {len(found) - _TOP} more", "", "", "", "", "", "", "", ""


def _crossed(each: Collective) -> str:
    """Return the level that a collective crosses; of one in two, the ranks inside, and the chunks of it."""
    if each.inner == 1:
        return each.level
    chunks = f" in {each.chunks} chunks" if each.chunks > 1 else ""
    return f"{each.inner} inside, {each.level}{chunks}"


def _solver_rows(plan: Plan) -> Iterator[Row]:
    solver = plan.solver
    yield (
        solver.status,
        format_seconds(solver.objective),
        format_seconds(solver.bound),
        f"{solver.gap:.2%}",
        str(solver.candidates),
        str(solver.seed),
    )


def _alternative_rows(plan: Plan) -> Iterator[Row]:
    for each in plan.alternatives:
        step = "-" if each.step_time_s is None else format_seconds(each.step_time_s)
        peak = "-" if each.peak_memory_bytes is None else format_bytes(each.peak_memory_bytes)
        yield format_degrees(each.degrees), step, peak, each.why_not
