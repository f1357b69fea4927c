"""Plan file: round trip, schema, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.ir import plan_json
from autopar.ir.mesh import AXIS_NAMES, Axis, Mesh
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.plan import (
    Alternative,
    Breakdown,
    Collective,
    Decisions,
    Estimates,
    Fingerprint,
    Memory,
    OperatorDecision,
    ParameterDecision,
    Plan,
    Solver,
    Warned,
    Workload,
)
from autopar.ir.strategy import Inner, MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta

SCHEMA = json.loads(resources.files("autopar.ir").joinpath("schema/plan.schema.json").read_text())
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)

texts = st.text(min_size=1, max_size=6)
sizes = st.integers(0, 2**50)
times = st.floats(0, 1e6, allow_nan=False)
placements: st.SearchStrategy[Placement] = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 5), st.integers(1, 64)),
    st.builds(Partial, st.sampled_from(["sum", "avg", "max", "min", "product"])),
)
inners = st.builds(
    Inner,
    st.sampled_from(["all_reduce", "all_gather"]),
    st.just("float32"),
    input=st.none() | st.integers(0, 3),
    without=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    times=st.integers(1, 3),
)
metas = st.builds(TensorMeta, st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(["int64", "bool"]))


def tuples(of: st.SearchStrategy[Any], size: int | None = None, most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=size or 0, max_size=most if size is None else size).map(tuple)


def _strategies(axes: int) -> st.SearchStrategy[MeshStrategy]:
    layouts = tuples(placements, axes)
    one = st.builds(
        Strategy, tuples(placements), tuples(st.none() | placements), st.sampled_from(["", "vocab"]), tuples(inners)
    )
    return st.builds(MeshStrategy, tuples(one, axes), tuples(layouts), tuples(st.none() | layouts))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(st.sampled_from(AXIS_NAMES), max_size=3, unique=True))
    mesh = Mesh(tuple(Axis(name, draw(st.integers(1, 8)), draw(texts)) for name in names))
    layouts = tuples(placements, len(names))
    operators = st.builds(
        OperatorDecision, target=texts, strategy=_strategies(len(names)), inputs=tuples(texts),
        output=st.none() | metas, source=st.text(max_size=5), instances=sizes, predicted_s=times,
    )  # fmt: skip
    collectives = st.builds(
        Collective, op=texts, axis=st.sampled_from(names), level=texts, bytes=sizes, count=sizes, phase=texts,
        tensor=texts, overlapped=st.booleans(), predicted_s=times,
    )  # fmt: skip
    decisions = Decisions(
        degrees={axis.name: axis.size for axis in mesh.axes},
        mesh=mesh,
        parameters=draw(st.dictionaries(texts, st.builds(ParameterDecision, placements=layouts), max_size=2)),
        operators=draw(st.dictionaries(texts, operators, max_size=2)),
        outputs=draw(st.dictionaries(texts, layouts, max_size=2)),
        collectives=draw(tuples(collectives)) if names else (),
    )
    memory = draw(st.builds(Memory, **dict.fromkeys(Memory.__dataclass_fields__, sizes)))
    breakdown = draw(st.builds(Breakdown, **dict.fromkeys(Breakdown.__dataclass_fields__, times)))
    total = sum(getattr(breakdown, field) for field in Breakdown.__dataclass_fields__)
    estimates = Estimates(
        step_time_s=total, mfu=draw(times), peak_memory_bytes=memory.total, memory=memory,
        memory_budget_bytes=draw(sizes), communication_bytes=draw(sizes), breakdown=breakdown,
        sources=draw(st.dictionaries(texts, texts, max_size=2)),
    )  # fmt: skip
    return Plan(
        fingerprint=draw(st.builds(Fingerprint, graph=texts, cluster=texts, torch=texts)),
        workload=draw(st.builds(Workload, tokens_per_step=st.none() | sizes)),
        cluster=draw(st.dictionaries(texts, st.none() | sizes | texts | st.lists(sizes), max_size=3)),
        decisions=decisions,
        estimates=estimates,
        solver=draw(st.builds(Solver, objective=times, bound=times, gap=times, seconds=st.none() | times)),
        alternatives=draw(tuples(st.builds(
            Alternative, degrees=st.dictionaries(texts, sizes, max_size=2), step_time_s=st.none() | times,
            peak_memory_bytes=st.none() | sizes,
        ), most=2)),
        warnings=draw(tuples(st.builds(Warned), most=2)),
    )  # fmt: skip


@given(plans())
def test_a_plan_reads_back_equal_and_fits_the_schema(plan: Plan):
    text = plan_json.to_json(plan)

    assert plan_json.from_json(text) == plan
    VALIDATOR.validate(json.loads(text))


def test_equal_plans_give_equal_bytes_whatever_the_order_of_their_keys(small_plan: Plan):
    decided = small_plan.decisions
    turned = replace(
        small_plan,
        decisions=replace(
            decided,
            degrees=dict(reversed(decided.degrees.items())),
            operators=dict(reversed(decided.operators.items())),
        ),
    )

    assert turned == small_plan
    assert plan_json.to_json(turned) == plan_json.to_json(small_plan)


def test_equal_numbers_of_other_types_give_equal_bytes(small_plan: Plan):
    whole = replace(small_plan, estimates=replace(small_plan.estimates, mfu=1))

    assert plan_json.to_json(whole) == plan_json.to_json(plan_json.from_json(plan_json.to_json(whole)))


def test_the_order_of_mesh_axes_survives(small_plan: Plan):
    assert plan_json.from_json(plan_json.to_json(small_plan)).decisions.mesh.names == ("dp_shard", "tp")


def test_the_shipped_schema_is_that_of_the_types():
    assert plan_json.plan_schema() == SCHEMA, "run: python -m tests.ir.write_schema"
    VALIDATOR.check_schema(SCHEMA)


def test_a_plan_file_bears_the_contracts_field_names(small_plan: Plan):
    document = json.loads(plan_json.to_json(small_plan))

    assert set(document) == {
        "format_version", "autopar_version", "fingerprint", "workload", "cluster", "decisions", "estimates", "solver",
        "constraints", "alternatives", "warnings", "digest",
    }  # fmt: skip
    assert document["decisions"]["mesh"] == [
        {"axis": "dp_shard", "size": 2, "level": "pod"},
        {"axis": "tp", "size": 4, "level": "node"},
    ]
    assert document["decisions"]["parameters"]["down.weight"] == {
        "placements": ["Replicate()", "Shard(0, outer=8)"],
        "gather": "none",
        "reduce": "step",
        "stage": 0,
    }


def test_one_degree_may_take_several_axes(small_plan: Plan):
    decided = small_plan.decisions
    axes = (Axis("tp", 2, "pod"), Axis("tp_2", 4, "node"))
    plan = replace(small_plan, decisions=replace(decided, mesh=Mesh(axes), degrees={"tp": 8, "pp": 1}, collectives=()))

    assert plan_json.from_json(plan_json.to_json(plan)) == plan


def test_saving_replaces_a_file_whole_and_leaves_nothing_beside_it(small_plan: Plan, tmp_path: Path):
    path = tmp_path / "new" / "plan.json"

    small_plan.save(path)
    small_plan.save(path)

    assert Plan.load(path) == small_plan
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]


def test_a_plan_that_contradicts_itself_is_not_written(small_plan: Plan):
    wrong = replace(small_plan, estimates=replace(small_plan.estimates, step_time_s=1.0))

    with pytest.raises(ValueError, match="contradicts itself: estimates.breakdown adds up to 0.0002 s"):
        plan_json.to_json(wrong)


def test_a_figure_that_is_not_finite_is_not_written(small_plan: Plan):
    wrong = replace(small_plan, solver=replace(small_plan.solver, bound=-math.inf))

    with pytest.raises(ValueError, match="figures are finite"):
        plan_json.to_json(wrong)


def _set(*path: str | int):
    def edit(document: Any, value: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit


def _drop(*path: str | int):
    def edit(document: Any, _: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return edit


EDITS = {
    "other major version": (_set("format_version"), "2.0", "format_version '2.0', and this autopar reads 1.x"),
    "version of another type": (_set("format_version"), 1, "format_version 1, and this autopar reads 1.x"),
    "missing part": (_drop("estimates", "mfu"), None, "p.json: estimates.mfu is missing; write the plan again"),
    "missing decision": (
        _drop("decisions", "parameters", "up.weight", "placements"), None,
        "decisions.parameters.up.weight.placements is missing",
    ),
    "text for a number": (_set("estimates", "step_time_s"), "fast", "step_time_s must be a number, and is 'fast'"),
    "true for a number": (
        _set("workload", "global_batch"), True, "workload.global_batch must be a whole number, and is true",
    ),
    "number for a list": (_set("warnings"), 3, "warnings must be a list, and is 3"),
    "null for an object": (_set("fingerprint"), None, "fingerprint must be an object, and is null"),
    "unknown status": (
        _set("solver", "status"), "good", "must be one of optimal, gap, time_limit, interrupted, priced, and is 'good'",
    ),
    "unknown placement": (
        _set("decisions", "parameters", "up.weight", "placements", 1), "Sharded(1)",
        "decisions.parameters.up.weight.placements[1] 'Sharded(1)' is no placement; use Replicate(), Shard(DIM) or",
    ),
    "too few placements": (
        _set("decisions", "parameters", "up.weight", "placements"), ["Shard(0)"],
        "decisions.parameters.up.weight.placements has 1 placements, but the mesh has 2 axes (dp_shard, tp)",
    ),
    "too few strategies": (
        _drop("decisions", "operators", "mm", "strategy", "axes", 0), None,
        "decisions.operators.mm.strategy.axes has 1 strategies, but the mesh has 2 axes",
    ),
    "degrees that do not multiply": (
        _set("decisions", "degrees", "tp"), 8,
        "decisions.degrees dp_shard=2 x tp=8 is 16 ranks, but the mesh (dp_shard=2 x tp=4) has 8",
    ),
    "swapped degrees": (
        _set("decisions", "degrees"), {"dp_shard": 4, "tp": 2}, "degrees.dp_shard is 4, but the mesh has dp_shard=2",
    ),
    "collective on no axis": (
        _set("decisions", "collectives", 0, "axis"), "ep", "decisions.collectives[0].axis 'ep' is no axis of the mesh",
    ),
    "rank outside": (_set("decisions", "stages", 0, "ranks"), [8], "stages[0].ranks names a rank outside 0..7"),
    "better step time": (
        _set("estimates", "step_time_s"), 1e-4, "estimates.breakdown adds up to 0.0002 s, but step_time_s is 0.0001 s",
    ),
    "smaller peak": (
        _set("estimates", "peak_memory_bytes"), 1, "memory adds up to 3145728 bytes, but peak_memory_bytes is 1",
    ),
    "edited placement": (
        _set("decisions", "parameters", "up.weight", "placements", 1), "Replicate()",
        "p.json was edited after autopar wrote it: decisions.parameters changed. A plan is only valid as a whole; "
        "ask `autopar plan` for what you want instead, with --fix, --forbid or --constraint",
    ),
    "edited cluster": (_set("cluster", "name"), "x", "was edited after autopar wrote it: cluster changed"),
    "not finite": (_set("estimates", "mfu"), float("inf"), "estimates.mfu must be a finite number, and is inf"),
    "added field": (_set("more"), 1, "was edited after autopar wrote it: more changed"),
    "no digest": (_drop("digest"), None, "digest is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_plan_is_refused(case: str, small_plan: Plan):
    edit, value, message = EDITS[case]
    document = json.loads(plan_json.to_json(small_plan))
    edit(document, value)

    with pytest.raises(UsageError, match=re.escape(message)):
        plan_json.from_json(json.dumps(document), "p.json")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (range(8), ""),
        (range(8, 12), "decisions.stages[1].ranks names 4 ranks, but the mesh has 8"),
        (range(4, 12), "decisions.stages[1].ranks names rank 4 of stage 0, but not all the ranks of that"),
        (range(7, -1, -1), "decisions.stages[1].ranks names rank 7 of stage 0, but not all the ranks of that"),
        (range(8, 16), ""),
    ],
    ids=str,
)
def test_the_ranks_of_a_stage_are_those_of_one_pipeline_rank(ranks: Iterable[int], message: str, small_plan: Plan):
    first = replace(small_plan.decisions.stages[0], ranks=tuple(range(8)))
    stages = (first, replace(first, index=1, ranks=tuple(ranks)))
    degrees = {**small_plan.decisions.degrees, "pp": 2}
    plan = replace(small_plan, decisions=replace(small_plan.decisions, stages=stages, degrees=degrees))

    found = [f"{path} {problem}" for path, problem in plan_json.inconsistencies(plan)]

    assert len(found) == bool(message)
    assert not message or message in found[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.json is empty; write it again with `autopar plan MODEL -o FILE`"),
        ("hello", "p.json is no JSON: Expecting value in line 1, column 1"),
        ('{"a": 1,,}', "p.json is no JSON"),
        ("[" * 100_000, "p.json is no plan file: it nests thousands"),
        ("[1]", "p.json is no plan file: it has no format_version"),
        ("{}", "p.json is no plan file: it has no format_version"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        plan_json.from_json(text, "p.json")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_told_as_cut_short(share: float, small_plan: Plan):
    text = plan_json.to_json(small_plan)

    with pytest.raises(UsageError, match="is cut short: it ends within the JSON text, in line"):
        plan_json.from_json(text[: int(len(text) * share)])


def test_a_missing_file_and_a_binary_file_are_told(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match=r"cannot read the plan .*/a: No such file or directory"):
        Plan.load(tmp_path / "a")
    with pytest.raises(UsageError, match="is no plan file: it is not UTF-8 text"):
        Plan.load(tmp_path / "b")


def test_a_plan_that_cannot_be_written_is_told(small_plan: Plan, tmp_path: Path):
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="cannot write the plan to .*; choose another -o FILE"):
        small_plan.save(tmp_path / "file" / "plan.json")
