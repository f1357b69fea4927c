"""Bounds of trials as a fluid against the plans that the search makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf

import pytest
import torch

from autopar import api
from autopar.api.estimating import Estimates
from autopar.api.outer import Outer
from autopar.api.pipelining import Wanted
from autopar.api.proofs import Proofs
from autopar.api.proving import prove
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.standing import Standing
from autopar.api.wishes import read_wishes
from autopar.api.works import Works
from autopar.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.models import resolve
from autopar.options import PlanOptions
from autopar.search.ilp import Solution
from autopar.search.meshes import MeshAxis, Role
from autopar.search.trials import Trial, Uniform
from cost_models.cluster import ClusterSpec
from tests.api.test_outer import CAPTURED, Deep, cluster, planned
from tests.support.remembering import remembered

MANY = remembered(Deep((512,) * 4), (torch.empty(8192, 128),))
WAYS = [Wanted(2), Wanted(2, "zb_h1"), Wanted(2, "interleaved_1f1b", 2), Wanted(2, "zbv", 2)]


def trial(depth: int, microbatches: int, recompute: Uniform) -> Trial:
    ranks = (MeshAxis("dp_shard", 4 // depth),) if depth < 4 else ()
    in_time = (MeshAxis("microbatch", microbatches),) if microbatches > 1 else ()
    return Trial((*in_time, *ranks), depth, recompute)


def proofs(spec: ClusterSpec, program: Captured = CAPTURED) -> Proofs:
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    return Proofs(Works(Solving(program.graph, spec, options), read_wishes(options)), mixes=True)


@pytest.mark.parametrize(
    ("memory", "bandwidth"), [("16 GiB", "100 Gbit/s"), ("2 MiB", "100 Gbit/s"), ("16 GiB", "1 Mbit/s")]
)
@pytest.mark.parametrize(
    ("depth", "microbatches", "recompute"),
    [*(pytest.param(1, 4, way, marks=pytest.mark.slow) for way in ("none", "full")), (2, 4, "none"), (2, 4, "full")],
)
def test_no_plan_of_a_trial_beats_its_bound(
    depth: int, microbatches: int, recompute: Uniform, memory: str, bandwidth: str
):
    proof = proofs(cluster(memory, bandwidth))
    ways = WAYS if depth > 1 else []
    given = trial(depth, microbatches, recompute)

    bound = proof.best(given, ways, 0.0)
    tight = proof.best(given, ways, 0.0, inf)

    priced = proof.works.solving.bound(given, proof.works.wishes, 60.0)
    assert not isinstance(priced, Solved)
    solved = proof.works.solving.solve(priced, proof.works.wishes, ways, inf, 60.0)
    assert solved.step_s >= tight.step_s >= bound.step_s > 0


def test_no_plan_of_several_micro_batches_beats_the_bound_of_its_relaxation():
    """Of reductions that run once a step, which take 3.9 s over Ethernet, one micro-batch hides 0.2 s."""
    found = resolve("zoo:gpt3-1.3b", batch=256, seq=2048)
    graph = api.program_of(found.model, found.shallow, found.example_inputs, "bf16")
    node = {"preset": "dgx-a100-40gb", "nic": {"bandwidth": "10Gbit/s", "latency": "25us"}}
    groups = [{"node": "slow", "count": 4}]
    spec = ClusterSpec.from_dict({"version": 1, "name": "ethernet", "nodes": {"slow": node}, "groups": groups})
    options = PlanOptions.parse(precision="bf16", optimizer="adamw")
    solving, wishes = Solving(graph, spec, options), read_wishes(options)
    given = Trial((MeshAxis("microbatch", 2), MeshAxis("dp_replicate", 4), MeshAxis("dp_shard", 8)))

    priced = solving.bound(given, wishes, 60.0)

    assert not isinstance(priced, Solved)
    solved = solving.solve(priced, wishes, (), inf, 60.0)
    assert priced.bound_s <= solved.step_s < 1.06 * priced.bound_s
    assert solved.solution.bound_s <= solved.step_s


def test_pipelines_that_wait_for_their_messages_are_proven_slower_than_one_stage():
    """Four stages of 45 us each hand over what takes a core 100 us to send, and as long to receive."""
    found = planned(cluster())

    assert found.decisions.degrees["pp"] == 1
    assert found.solver.gap < 0.01


@cache
def planned_in_little_memory() -> Plan:
    return planned(cluster("4 MiB"), memory_margin=0.0)


@pytest.mark.parametrize("proving_s", [60.0, 0.0])
def test_part_of_the_time_limit_is_kept_for_proofs(monkeypatch: pytest.MonkeyPatch, proving_s: float):
    whole = planned_in_little_memory()

    def late(outer: Outer, left: Callable[[], float]) -> bool:
        monkeypatch.setattr(Standing, "left_s", 0.0)
        monkeypatch.setattr(Standing, "left_to_prove_s", proving_s)
        return lighten(outer, left)

    lighten = Outer._lighten
    monkeypatch.setattr(Outer, "_lighten", late)

    found = planned(cluster("4 MiB"), memory_margin=0.0)

    assert found.solver.objective == whole.solver.objective
    proven = found.solver.bound / whole.solver.bound
    assert proven == pytest.approx(1.0) if proving_s else proven < 0.5


def test_less_memory_bounds_more_until_nothing_fits():
    found = [
        proofs(cluster(memory)).best(trial(1, 1, "full"), [], 0.0).step_s
        for memory in ("1 GiB", "980 KiB", "975 KiB", "970 KiB", "960 KiB")
    ]

    assert found == sorted(found)
    assert found[0] < found[-2] < inf
    assert found[-1] == inf


def test_what_may_recompute_less_is_not_bounded_by_what_recomputing_all_of_it_takes():
    """Estimates relax the program with all recomputed, which is more than a plan takes that recomputes some blocks."""
    spec, options = cluster("16 GiB", "100 Gbit/s"), PlanOptions.parse(memory_margin=0.0, gap=0.0)
    solving = Solving(MANY.graph, spec, options)
    search = Standing(solving, read_wishes(options), mixes=True)
    given = trial(1, 2, "full")
    search.estimates.of([given], fits=False)
    plain = solving.bound(replace(given, recompute="none"), search.wishes, 60.0)
    assert isinstance(plain, Waiting)
    lighter = solving.solve(plain, search.wishes, [], inf, 60.0)
    search.solved = [Solved(given, Solution("cutoff", (), inf, 0.0))]

    prove(search)

    assert search.known_bound_s(given) > lighter.step_s
    assert 0.0 < search.solved[0].solution.bound_s <= lighter.step_s


def test_that_collectives_are_little_in_a_node_says_nothing_of_those_that_leave_it():
    """Reductions of 4 MiB take most of a second over 100 Mbit/s, and milliseconds in the node."""
    node = {"device": "cpu", "count": 2, "links": {"bandwidth": "9 GB/s", "latency": "1us"},
            "nic": {"bandwidth": "100 Mbit/s", "latency": "10us"}}  # fmt: skip
    groups = [{"node": "host", "count": 2}]
    spec = ClusterSpec.from_dict({"version": 1, "name": "slow", "nodes": {"host": node}, "groups": groups})
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    search = Standing(Solving(MANY.graph, spec, options), read_wishes(options), mixes=True)
    near, far = trial(2, 2, "none"), trial(1, 2, "none")
    search.estimates.of([near, far], fits=True)
    search.solved = [Solved(each, Solution("cutoff", (), inf, 0.0)) for each in (near, far)]

    prove(search)

    work_s = search.estimates.bound_s(far)
    assert search.solved[1].solution.bound_s > 2.0 * work_s > 0.0


@pytest.mark.parametrize("bandwidth", ["50 Mbit/s", "200 Mbit/s", "1 Gbit/s"])
def test_what_runs_once_a_step_is_bounded_with_as_many_micro_batches_as_a_trial_has(bandwidth: str):
    """One micro-batch hides sums of gradients behind all of backward, of four each has a quarter of it."""
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    solving = Solving(CAPTURED.graph, cluster("16 GiB", bandwidth), options)
    search, given = Standing(solving, read_wishes(options), mixes=True), trial(2, 4, "none")
    search.estimates.of([given], fits=True)
    search.solved = [Solved(given, Solution("cutoff", (), inf, 0.0))]

    prove(search)

    whole, priced = (solving.bound(each, search.wishes, 60.0) for each in (Trial(given.ranks), given))
    assert isinstance(priced, Waiting)
    reached_s = solving.solve(priced, search.wishes, WAYS, inf, 60.0).step_s
    weaker_s = max(whole.free_s / solving.at_once(given), search.fluid_of(given).step_s)
    assert 1.9 * weaker_s < search.solved[0].solution.bound_s <= reached_s
    more, fewer = (search.known_bound_s(trial(2, count, "none")) for count in (8, 2))
    assert fewer < search.solved[0].solution.bound_s <= more


@pytest.mark.parametrize(("depth", "microbatches"), [(2, 1), (2, 8), (4, 4)])
def test_no_pipeline_on_shared_cores_beats_its_bound(depth: int, microbatches: int):
    links = {"bandwidth": "9 GB/s", "latency": "1us"}
    shared = ClusterSpec.from_dict({
        "version": 1,
        "name": "shared",
        "nodes": {"host": {"device": "cpu", "count": 4, "cores": 2, "links": links}},
        "groups": [{"node": "host", "count": 1}],
    })  # fmt: skip
    heavy = remembered(Deep((1024,) * 4), (torch.empty(8192, 128),))
    proof, given = proofs(shared, heavy), trial(depth, microbatches, "none")

    bound = proof.best(given, [Wanted(depth), Wanted(depth, "zb_h1")], 0.0)
    tight = proof.best(given, [Wanted(depth), Wanted(depth, "zb_h1")], 0.0, inf)

    priced = proof.works.solving.bound(given, proof.works.wishes, 60.0)
    assert not isinstance(priced, Solved)
    solved = proof.works.solving.solve(priced, proof.works.wishes, [Wanted(depth), Wanted(depth, "zb_h1")], inf, 60.0)
    assert solved.step_s < inf
    assert 0.5 * solved.step_s < bound.step_s <= tight.step_s <= solved.step_s


@cache
def few_tokens() -> tuple[Graph, ClusterSpec]:
    """Return a program in bfloat16 most of whose time casts of parameters and gradients take, and eight devices."""
    found = resolve("zoo:gpt3-1.3b", batch=256, seq=16)
    return api.program_of(found.model, found.shallow, found.example_inputs, "bf16"), ClusterSpec.parse("dgx-h100")


@cache
def many_experts(batch: int) -> tuple[Graph, ClusterSpec]:
    """Return a mixture in bfloat16 that has more experts than a sample has tokens, and eight devices."""
    small = {"layers": "1", "experts": "64", "intermediate": "3584"}
    found = resolve("zoo:mixtral-8x7b", batch=batch, seq=16, overrides=small)
    return api.program_of(found.model, found.shallow, found.example_inputs, "bf16"), ClusterSpec.parse("dgx-h100")


def bounds_and_step(graph: Graph, spec: ClusterSpec, given: Trial) -> tuple[list[float], float]:
    """Return what is known of a trial before it is solved, and the seconds of a plan, which need not be the best."""
    options = PlanOptions.parse(memory_margin=0.0, gap=0.05, optimizer="adamw")
    solving, wishes = Solving(graph, spec, options), read_wishes(options)
    works = Works(solving, wishes)
    estimates = Estimates(works, False, lambda: 60.0)
    estimates.of([given], fits=False)
    proofs = Proofs(works, mixes=False)
    fluid_s = proofs.best(given, [], estimates.microbatch_s(given)).step_s
    known = [fluid_s, estimates.bound_s(given), proofs.work_s(given)]
    priced = solving.bound(given, wishes, 60.0)
    assert not isinstance(priced, Solved)
    found = solving.solve(priced, wishes, [], inf, 5.0)
    assert found.outcome is not None
    return known, found.step_s


@pytest.mark.parametrize(
    "axes",
    [
        {"microbatch": 32, "dp_shard": 8}, {"dp_shard": 8}, {"microbatch": 32, "dp_shard": 4, "tp": 2}, {"free": 8},
        {"dp_shard": 4, "free": 2}, {"microbatch": 2, "dp_shard": 4, "cp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_no_plan_beats_its_bounds_where_ranks_share_casts_of_parameters(axes: dict[Role, int]):
    """Ranks that split the batch cast a part of each parameter and gradient: whole casts are no bound of theirs."""
    known, step_s = bounds_and_step(*few_tokens(), Trial(tuple(MeshAxis(*each) for each in axes.items())))

    assert 0.0 < known[0] <= step_s
    assert max(known[1:]) <= step_s
    assert known[2] > 0.0


@pytest.mark.parametrize("batch", [64, 2048])
@pytest.mark.parametrize("axes", [{"dp_shard": 8}, {"ep": 8}, {"ep": 4, "tp": 2}], ids=str)
def test_no_plan_beats_its_bounds_where_ranks_share_experts(axes: dict[Role, int], batch: int):
    """A rank reads fewer experts for the tokens of more samples: what its own samples take with all is no bound."""
    replicas = axes.get("dp_shard", 1) * axes.get("ep", 1)
    mesh = (MeshAxis("microbatch", batch // replicas), *(MeshAxis(*each) for each in axes.items()))

    known, step_s = bounds_and_step(*many_experts(batch), Trial(mesh))

    assert 0.0 < known[0] <= step_s
    assert max(known[1:]) <= step_s
    assert known[2] > 0.0


def test_what_multiplies_takes_each_rank_as_long_whoever_makes_which_gradients():
    """Ranks that share experts make gradients of a part for the samples of all, which is as much work."""
    graph, spec = many_experts(16384)
    options = PlanOptions.parse(memory_margin=0.0, optimizer="none")
    works = Works(Solving(graph, spec, options), read_wishes(options))
    shared, whole = (Trial((MeshAxis("microbatch", 2), MeshAxis(role, 8))) for role in ("dp_shard", "dp_replicate"))
    proofs = Proofs(works, mixes=False)

    assert proofs.best(shared, [], 0.0).step_s > 0.9 * proofs.best(whole, [], 0.0).step_s
    assert proofs.work_s(shared) == pytest.approx(proofs.work_s(whole))
    assert proofs.work_s(shared) > 0.9 * proofs.best(shared, [], 0.0).step_s
    apart = replace(shared, mesh=(MeshAxis("microbatch", 2), MeshAxis("ep", 8)))
    assert proofs.work_s(apart) > 0.9 * proofs.best(apart, [], 0.0).step_s


def test_experts_on_ranks_of_their_own_are_bounded_by_what_they_take_beyond_their_work():
    """What a sample takes is known of ranks that hold all experts: of others only what hosts take to issue it."""
    graph, spec = many_experts(16384)
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    search = Standing(Solving(graph, spec, options), read_wishes(options), mixes=True)
    in_time = MeshAxis("microbatch", 2)
    all_here = Trial((in_time, MeshAxis("dp_shard", 8)))
    apart = Trial((in_time, MeshAxis("dp_shard", 4), MeshAxis("ep", 2)))
    search.estimates.of([all_here, apart], fits=True)
    search.solved = [Solved(each, Solution("cutoff", (), inf, 0.0)) for each in (all_here, apart)]

    prove(search)

    assert search.solved[1].solution.bound_s > 1.03 * search.fluid_of(apart).step_s > 0.0


def test_free_axes_are_bounded_by_the_best_they_may_be():
    free, data, tensor = (
        proofs(cluster(), MANY).best(Trial((MeshAxis(role, 4),)), [], 0.0).step_s for role in ("free", "dp_shard", "tp")
    )

    assert 0.0 < free <= min(data, tensor) * (1.0 + 1e-6)
    assert free > 0.9 * min(data, tensor)


@pytest.mark.parametrize("bandwidth", ["50 Mbit/s", "200 Mbit/s"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_whole_program_on_a_stages_mesh_bounds_its_pipelines(microbatches: int, bandwidth: str):
    """It knows what gradients take to travel, which the fluid does not."""
    proof = proofs(cluster("16 GiB", bandwidth))
    solving, given = proof.works.solving, trial(2, microbatches, "none")

    whole = solving.bound(Trial(given.ranks), proof.works.wishes, 60.0)
    priced = solving.bound(given, proof.works.wishes, 60.0)
    assert not isinstance(whole, Solved)
    assert not isinstance(priced, Solved)
    solved = solving.solve(priced, proof.works.wishes, WAYS, inf, 60.0)

    assert proof.best(given, WAYS, 0.0).step_s < whole.free_s / solving.at_once(given) <= solved.step_s
