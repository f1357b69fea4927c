"""Estimates of trials, and the bounds that follow from them, against the plans that the search makes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch

from autopar.api import program_of
from autopar.api.estimating import Estimates
from autopar.api.planning import Planner, Program
from autopar.api.schedules import ways_to_run
from autopar.api.sequences import share_of_tokens
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.wishes import read_wishes
from autopar.api.works import Works
from autopar.capture import Captured
from autopar.costs.rough import Shape, evenly
from autopar.ir.plan import Estimates as PlanEstimates
from autopar.models.zoo import ZOO
from autopar.models.zoo.gpt import GptSettings
from autopar.models.zoo.llama import LlamaSettings
from autopar.options import PlanOptions
from autopar.search.meshes import MeshAxis, Role
from autopar.search.trials import Trial, Uniform
from autopar.strategies.experts import sent_to_experts
from cost_models.cluster import ClusterSpec
from tests.api.test_outer import CAPTURED, Deep, cluster
from tests.support.remembering import remembered
from tests.support.two_hosts import cluster as two_hosts

HOSTS = {
    "version": 1,
    "name": "two hosts",
    "nodes": {
        "n": {
            "device": "h100-sxm-80gb",
            "count": 4,
            "links": {"bandwidth": "450GB/s", "latency": "1us", "topology": "switch"},
            "nic": {"bandwidth": "100Mbit/s", "latency": "5us"},
        }
    },
    "groups": [{"node": "n", "count": 2}],
}
MANY_SAMPLES = remembered(Deep(), (torch.empty(8192, 128),))
SIX_SAMPLES = remembered(Deep(), (torch.empty(6, 128),))
LLAMA = LlamaSettings(1, 64, 8, 4, 64, vocab=64, sequence=64)
TOKENS = remembered(LLAMA.model(), LLAMA.inputs(4, 64))
EIGHT_BLOCKS = remembered(Deep((4096,) * 8), (torch.empty(1 << 16, 128),))
MIXTURE = ZOO["mixtral-tiny"]
EXPERTS = remembered(MIXTURE.model(), MIXTURE.inputs(16, 64))
WIDE_MIXTURE = replace(MIXTURE, hidden=1024, intermediate=4096, experts=16)


def estimates(program: Captured = CAPTURED, spec: ClusterSpec | None = None, *, mixes: bool = False) -> Estimates:
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    solving = Solving(program.graph, spec or cluster(), options)
    return Estimates(Works(solving, read_wishes(options)), mixes, lambda: 60.0)


def step_s(of: Estimates, trial: Trial) -> float:
    priced = of.solving.bound(trial, of.wishes, 60.0)
    assert not isinstance(priced, Solved)
    return of.solving.solve(priced, of.wishes, [], inf, 60.0).step_s


@pytest.mark.parametrize("role", ["dp_shard", "dp_replicate", "tp", "free"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("program", [CAPTURED, MANY_SAMPLES], ids=["few samples", "many samples"])
def test_no_plan_of_a_trial_beats_its_bound(program: Captured, recompute: Uniform, role: Role):
    found = estimates(program)
    trial = Trial((MeshAxis(role, 4),), recompute=recompute)
    found.of([trial], fits=False)

    assert found.bound_s(trial) <= step_s(found, trial) * (1 + 1e-9)


def test_what_small_batches_take_bounds_no_larger_ones():
    found = estimates(MANY_SAMPLES)
    whole = Trial((MeshAxis("dp_shard", 4),))
    small = Trial((MeshAxis("microbatch", 512), MeshAxis("dp_shard", 4)))
    found.of([small], fits=False)

    assert 0.0 < found.bound_s(small) <= step_s(found, small) * (1 + 1e-9)
    assert found.bound_s(whole) <= step_s(found, whole) * (1 + 1e-9)
    assert found.microbatch_s(whole) <= step_s(found, whole) * (1 + 1e-9)


@pytest.mark.parametrize(
    "axes",
    [
        {"cp": 4},
        pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow),
        {"dp_shard": 2, "cp": 2},
    ],
    ids=str,
)
def test_no_plan_that_splits_tokens_beats_its_bound(axes: dict[Role, int]):
    found = estimates(TOKENS)
    trial = Trial(tuple(MeshAxis(role, size) for role, size in axes.items()))
    likely = found.of([trial], fits=False)
    priced = found.solving.bound(trial, found.wishes, 60.0)

    assert isinstance(priced, Waiting)
    assert 0.0 < found.bound_s(trial) <= priced.bound_s * (1 + 1e-9)
    assert likely[trial] < inf


def test_attention_is_split_by_tokens_as_far_as_heads_go():
    graph = TOKENS.graph

    assert share_of_tokens(graph, 1, 4) == 1.0
    assert share_of_tokens(graph, 4, 1) == share_of_tokens(graph, 2, 1) / 2 == 0.25
    assert share_of_tokens(graph, 2, 4) == 0.5
    assert 0.25 < share_of_tokens(graph, 4, 4) < 1.0


def test_what_tensor_parallel_ranks_take_says_nothing_of_axes_that_may_split_the_batch():
    """With many samples a free axis splits them, which takes far less than tensor parallelism."""
    found = estimates(MANY_SAMPLES)
    free, tensor = (Trial((MeshAxis(role, 4),)) for role in ("free", "tp"))
    found.of([free, tensor], fits=False)

    assert found.bound_s(tensor) > 1.1 * step_s(found, free)
    assert found.bound_s(free) == found.microbatch_s(free) == 0.0


@pytest.mark.parametrize(("program", "role"), [(MANY_SAMPLES, "dp_shard"), (CAPTURED, "tp")])
def test_free_axes_are_estimated_as_the_better_of_what_they_may_be(program: Captured, role: Role):
    """As tensor parallelism alone, a mesh whose plan splits the batch looked too slow to be tried."""
    free, data, tensor = (Trial((MeshAxis(each, 4),)) for each in ("free", "dp_shard", "tp"))
    found = estimates(program).of([free, data, tensor], fits=False)

    assert found[free] == min(found[data], found[tensor]) == found[Trial((MeshAxis(role, 4),))]
    assert max(found[data], found[tensor]) > 1.1 * found[free]


def test_widths_that_time_is_too_short_for_are_estimated_with_their_collectives():
    """By proportion alone, tensor parallelism over two hosts at 100 Mbit/s looked faster than inside of one."""
    inside, across = (Trial((MeshAxis("tp", width),)) for width in (2, 8))
    left = [60.0]
    found = estimates(TOKENS, ClusterSpec.from_dict(HOSTS))
    found.left_s = lambda: left[0]
    near = found.of([Trial(()), inside], fits=True)
    left[0] = 0.0
    scaled = found.more([across], fits=True)[across]
    computed = estimates(TOKENS, ClusterSpec.from_dict(HOSTS)).of([across], fits=True)[across]

    assert computed > near[inside]
    assert scaled > near[inside]


def test_what_recomputation_adds_is_taken_from_other_widths_where_time_is_short():
    """Recomputing takes longer than not to, with the collectives of the width, of which one rank alone says nothing."""
    found = estimates(MANY_SAMPLES)
    for way, width in (("none", 1), ("full", 1), ("none", 4)):
        found._computed(way, width, 2048)
    found._kept_s = found._kept_of_again_s = inf

    alone, again, plain = (
        found._computed(way, width, 2048).own_s for way, width in (("full", 1), ("full", 4), ("none", 4))
    )

    assert ("full", 4, 2048) not in found._taken
    assert again / plain == pytest.approx(alone / found._computed("none", 1, 2048).own_s)


def test_who_computes_alone_waits_for_nobody_however_times_are_rounded():
    """Three times a time over three may be less than the time, and the rest was taken for that of collectives."""
    seconds = next(x / 1000 for x in range(1, 1000) if x / 1000 * 3 / 3 < x / 1000)
    found = estimates(TOKENS)
    found.left_s = lambda: -1.0
    found._taken["none", 1, 3] = evenly(seconds)

    assert found._computed("none", 1, 6).own_s == pytest.approx(2.0 * seconds)
    assert found._computed("none", 2, 3).own_s == pytest.approx(seconds / 2.0)


def test_a_free_axis_is_no_data_parallelism_where_the_batch_does_not_divide():
    free, tensor = (Trial((MeshAxis(each, 4),)) for each in ("free", "tp"))
    found = estimates(SIX_SAMPLES).of([free, tensor], fits=False)

    assert found[free] == found[tensor]


@pytest.mark.parametrize("axes", [{"dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 4}, {"dp_replicate": 8}], ids=str)
def test_estimates_know_over_which_links_gradients_travel(axes: dict[Role, int]):
    """Over slow links they are all of a step: of the second mesh, a quarter of them crosses."""
    found = estimates(MANY_SAMPLES, ClusterSpec.from_dict(HOSTS))
    trial = Trial(tuple(MeshAxis(role, size) for role, size in axes.items()))

    likely_s = found.of([trial], fits=True)[trial]

    assert 0.7 < likely_s / step_s(found, trial) < 1.4


@pytest.mark.parametrize("latency", ["100us", "1ms", "20ms"])
def test_estimates_know_that_calls_take_their_latency(latency: str):
    """Blocks hide what others move, if each has a call of its own; where latency is most of a step, there is one."""
    nic = {"bandwidth": "400Gbit/s", "latency": latency}
    spec = {**HOSTS, "nodes": {"n": {**HOSTS["nodes"]["n"], "nic": nic}}}
    found = estimates(EIGHT_BLOCKS, ClusterSpec.from_dict(spec))
    trial = Trial((MeshAxis("dp_shard", 8),))

    likely_s = found.of([trial], fits=True)[trial]

    assert 0.7 < likely_s / step_s(found, trial) < 1.4


def test_estimates_know_that_experts_gradients_stay_with_their_ranks_and_that_tokens_travel():
    found = estimates(EXPERTS, ClusterSpec.from_dict(HOSTS))
    split, together = (Trial((MeshAxis("dp_shard", 8 // size), MeshAxis("ep", size))) for size in (2, 4))
    apart = Trial((MeshAxis("dp_shard", 8),))

    likely = found.of([split, together, apart], fits=True)

    solved = {trial: step_s(found, trial) for trial in likely}
    assert all(0.6 < likely[trial] / solved[trial] < 1.6 for trial in likely)


@pytest.mark.parametrize("axes", [{"dp_shard": 8}, {"dp_shard": 2, "ep": 4}, {"ep": 8}], ids=str)
def test_estimates_know_that_ranks_cast_their_shards_and_multiply_with_their_own_experts(axes: dict[Role, int]):
    """Counted whole for each rank, casts and experts' weights are a third of a step that does neither.

    Casts of gradients are counted for each micro-batch where ranks keep whole sums: the first is 1.31 of what is found.
    """
    with torch.device("meta"):
        model = WIDE_MIXTURE.model()
    graph = program_of(model, (), WIDE_MIXTURE.inputs(64, 64), "bf16")
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0, precision="bf16")
    solving = Solving(graph, ClusterSpec.parse("h100-sxm-80gb:8"), options)
    found = Estimates(Works(solving, read_wishes(options)), False, lambda: 60.0)
    trial = Trial((MeshAxis("microbatch", 4), *(MeshAxis(role, size) for role, size in axes.items())))

    assert 0.8 < found.of([trial], fits=True)[trial] / step_s(found, trial) < 1.35


def test_the_largest_parameter_is_whole_while_something_is_computed_with_it():
    """On ranks that split experts that of one's own: a mesh with more of these has room where another has not."""
    solving = Solving(EXPERTS.graph, cluster(), PlanOptions.parse())
    rough = solving.rough("full", read_wishes(solving.options))
    largest = max(meta.nbytes for op in EXPERTS.graph.ops if op.kind == "parameter" and (meta := op.outputs[0]))
    together, split = (Shape(1, 1, 16, 16, 1, experts) for experts in (1, 8))

    assert rough.least_bytes(together) > largest
    assert rough.least_bytes(together) - rough.least_bytes(split) == pytest.approx(largest * 7 / 8)


def test_tokens_that_experts_are_sent_are_counted_once_a_layer():
    """16 samples of 64 tokens, each to two of the experts with half more room, in two layers of 64 channels."""
    assert sent_to_experts(EXPERTS.graph) == 16 * 64 * 2 * 1.5 * 64 * 4 * 2
    assert sent_to_experts(TOKENS.graph) == 0.0


def test_estimates_know_messages_between_stages():
    found = estimates(MANY_SAMPLES, ClusterSpec.from_dict(HOSTS))
    trial = Trial((MeshAxis("microbatch", 8), MeshAxis("dp_shard", 4)), depth=2)
    likely_s = found.of([trial], fits=True)[trial]
    priced = found.solving.bound(trial, found.wishes, 60.0)

    assert isinstance(priced, Waiting)
    solved = found.solving.solve(priced, found.wishes, [found.wishes.wanted(2)], inf, 60.0)
    assert 0.5 < likely_s / solved.step_s < 1.5


@pytest.mark.parametrize(("depth", "microbatches"), [(2, 2), (4, 4), (4, 8)])
def test_estimates_know_that_schedules_leave_little_of_a_bubble(depth: int, microbatches: int):
    """Of 1F1B it is up to 7 of 11 micro-batches' seconds; those that split backward or stages leave a sixth of that."""
    found = estimates(EIGHT_BLOCKS, ClusterSpec.parse("h100-sxm-80gb:4"))
    trial = Trial((MeshAxis("microbatch", microbatches), *([MeshAxis("tp", 2)] if depth == 2 else [])), depth=depth)
    likely_s = found.of([trial], fits=True)[trial]
    priced = found.solving.bound(trial, found.wishes, 60.0)

    assert isinstance(priced, Waiting)
    ways = ways_to_run(trial, found.wishes, 8)
    solved = found.solving.solve(priced, found.wishes, ways, inf, 60.0)
    assert 0.75 < likely_s / solved.step_s < 1.1


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_estimates_know_that_long_attention_is_the_last_to_be_recomputed(share: float):
    """It takes most of what recomputation takes and holds least: an even share of that is up to 15 % too slow."""
    settings = GptSettings(layers=4, hidden=64, heads=4, vocab=64, positions=2048, fused_attention=True)
    program = remembered(settings.model(), settings.inputs(4, 2048))

    def planned(memory_bytes: int, **way: str) -> PlanEstimates:
        fix = {"pp": 1, "dp_replicate": 2, "microbatch": 2, **way}
        options = PlanOptions.parse(fix=fix, memory_margin=0, gap=0.0)
        return Planner(Program(program.graph, "gpt", "", None), two_hosts(memory_bytes), options).plan().estimates

    most, least = (planned(1 << 34, recompute=way).peak_memory_bytes for way in ("none", "full"))
    memory = int(least + share * (most - least))
    trial = Trial((MeshAxis("dp_replicate", 2),), recompute="full")

    likely = estimates(program, two_hosts(memory), mixes=True).of([trial], fits=False)

    assert likely[trial] == pytest.approx(planned(memory).step_time_s, rel=0.03)
