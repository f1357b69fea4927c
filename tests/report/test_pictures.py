"""Plans as tables, graphs and pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, Schedule, Stage, StageEstimate, Warned
from autopar.report.html import html
from autopar.report.outline import edges_into, parameter_groups, summary
from autopar.report.pictures import dot, mermaid
from autopar.report.table import print_table, table_text
from autopar.simulate.planned import planned_timeline

Golden = Callable[[str, str], None]


def test_table_of_the_small_plan(small_plan: Plan, golden: Golden):
    golden("table.txt", table_text(small_plan))


def test_collectives_in_two_levels_are_shown_with_the_ranks_inside(small_plan: Plan, golden: Golden):
    gathered, reduced = small_plan.decisions.collectives
    two_level = (replace(gathered, inner=4), replace(reduced, inner=2, chunks=8))
    text = table_text(replace(small_plan, decisions=replace(small_plan.decisions, collectives=two_level)))

    golden("two_level.txt", text[text.index("collectives\n") : text.index("search\n")])


def test_dot_of_the_small_plan(small_plan: Plan, golden: Golden):
    golden("plan.dot", dot(small_plan))


def test_mermaid_of_the_small_plan(small_plan: Plan, golden: Golden):
    golden("plan.mmd", mermaid(small_plan))


def test_summary_has_degrees_time_memory_mfu_and_gap(small_plan: Plan):
    assert summary(small_plan) == (
        "plan: dp_shard=2 x tp=4, step 200 us, peak memory 3.00 MiB of 72.00 GiB, MFU 25.0%, gap 0.50% (optimal)"
    )
    assert table_text(small_plan).splitlines()[-1] == summary(small_plan)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_without_no_color(
    variable: str, coloured: bool, small_plan: Plan, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", variable)
    terminal, pipe = Terminal(), StringIO()

    print_table(small_plan, terminal)
    print_table(small_plan, pipe)

    assert ("\x1b[36m" in terminal.getvalue() or "\x1b[1;36m" in terminal.getvalue()) == coloured
    assert "\x1b" not in pipe.getvalue()


def test_a_narrow_terminal_gets_no_line_wider_than_it_is(small_plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    long = Warned(code="long", text="some words " * 12, location=None)
    plan = replace(small_plan, warnings=(long,))
    terminal = Terminal()

    print_table(plan, terminal)

    assert max(map(len, re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()).splitlines())) <= 40
    assert max(map(len, table_text(plan).splitlines())) > 100


def test_equal_layers_are_one_row(small_plan: Plan):
    decided = small_plan.decisions
    one, other = decided.parameters.values()
    parameters = {f"layers.{i}.up.weight": one for i in range(3)} | {"layers.3.up.weight": other, "head.weight": other}
    plan = replace(small_plan, decisions=replace(decided, parameters=parameters))

    assert [(each.name, each.count) for each in parameter_groups(plan)] == [
        ("head.weight", 1),
        ("layers.*.up.weight", 3),
        ("layers.3.up.weight", 1),
    ]


def test_edges_bear_the_collectives_between_layouts(small_plan: Plan):
    decided = small_plan.decisions
    loss, mm_1 = decided.operators["loss"], decided.operators["mm_1"]
    plan = replace(small_plan, decisions=replace(decided, operators={"loss": loss, "mm_1": mm_1}))

    (into_loss,) = edges_into(plan, "loss")
    from_x, _ = edges_into(plan, "mm_1")

    assert (into_loss.source, into_loss.steps) == ("mm_1", ("reduce_scatter tp",))
    assert (from_x.source, from_x.known) == ("mm", False)


class Tags(HTMLParser):
    """Collects the tags that are open at the end, and what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_escaped(small_plan: Plan):
    warned = replace(small_plan, warnings=(Warned(code="x", text="<script>alert(1)</script>"),))
    page = html(warned)
    tags = Tags()

    tags.feed(page)

    assert tags.open == []
    assert tags.fetched == []
    assert "<script>" not in page
    for text in (summary(small_plan), "up.weight", "aten.mm.default", "all_gather", "50 % slower", "roofline"):
        assert text in page


def staged(plan: Plan) -> Plan:
    """The small plan as two stages of four ranks each, with figures that make its picture easy to check."""
    stages = (
        Stage(index=0, ranks=(0, 1, 2, 3), blocks=("layers.0", "layers.1"), parameters=("up.weight",)),
        Stage(index=1, ranks=(4, 5, 6, 7), blocks=("layers.2",), parameters=("down.weight",)),
    )
    each = StageEstimate(
        index=0,
        step_time_s=0.12,
        peak_memory_bytes=2**30,
        forward_s=0.01,
        input_gradient_s=0.01,
        weight_gradient_s=0.01,
    )  # fmt: skip
    schedule = Schedule(name="zb_h1", interleave=1, num_microbatches=4)
    return replace(
        plan,
        decisions=replace(plan.decisions, stages=stages, schedule=schedule),
        estimates=replace(plan.estimates, per_stage=(each, replace(each, index=1, peak_memory_bytes=2**29))),
    )


def test_stages_are_shown_with_blocks_seconds_bytes_and_a_picture_of_their_schedule(small_plan: Plan, golden: Golden):
    plan = staged(small_plan)

    text = table_text(plan, timeline=planned_timeline(plan))

    golden("stages.txt", text[text.index("stages (") : text.index("time of a step")])


def test_a_plan_without_stages_has_no_timeline(small_plan: Plan):
    assert planned_timeline(small_plan) is None


def test_recomputed_blocks_are_counted_and_named(small_plan: Plan):
    ways = {f"layers.{at}": "full" for at in range(6)} | {"layers.6": "per_operator"}
    some = table_text(replace(small_plan, decisions=replace(small_plan.decisions, recompute=ways)))
    every = table_text(replace(small_plan, decisions=replace(small_plan.decisions, recompute={"*": "full"})))

    assert "layers.0, layers.1, layers.2, layers.3 and 2 more" in some
    assert "per_operator" in some
    assert "layers.6" in some
    assert [line.split() for line in every.splitlines() if line.startswith("full")] == [["full", "all"]]
    assert "recomputation" not in table_text(small_plan)


def test_a_plan_without_axes_names_none(small_plan: Plan):
    alone = replace(small_plan, decisions=replace(small_plan.decisions, mesh=Mesh(())))

    assert "()" not in table_text(alone)
    assert "()" not in html(alone)
