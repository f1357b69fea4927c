"""What the user fixes is honoured, or refused with a way out."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.placement import Replicate, Shard
from autopar.models import zoo


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def plan(cluster: str = "cpu:4", batch: int = 8, width: int = 64, **options: object) -> autopar.Plan:
    with torch.device("meta"):
        model, x = Net(width), torch.empty(batch, width)
    return autopar.plan(model, cluster, example_inputs=(x,), **options)


def test_fixed_degrees_are_the_plans_degrees() -> None:
    degrees = plan(fix={"dp_replicate": 2, "tp": 2}).decisions.degrees

    assert (degrees["dp_replicate"], degrees["tp"]) == (2, 2)


@pytest.mark.parametrize("fix", [{"dp_replicate": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("batch", [2, 1 << 14])
def test_axes_that_are_left_open_have_other_names_than_fixed_ones(batch: int, fix: dict[str, int]) -> None:
    """Where they keep whole parameters as the fixed axis does, its degree was that of both."""
    degrees = plan(batch=batch, fix={**fix, "pp": 1}).decisions.degrees

    assert degrees | fix == degrees
    assert prod(degrees.values()) == 4


def test_a_fixed_tensor_degree_splits_the_matrices() -> None:
    placed = plan(fix={"tp": 4}).decisions.parameters

    assert all(isinstance(placed[name].placements[0], Shard) for name in ("up.weight", "down.weight"))


def test_zero_three_shards_at_rest_and_gathers_in_each_phase() -> None:
    placed = plan(batch=1024, fix={"dp_shard": 4, "zero": 3}).decisions.parameters

    assert {p.placements for p in placed.values()} == {(Shard(0),)}
    assert placed["up.weight"].gather == "per_phase"


def test_zero_three_gathers_nothing_that_outweighs_the_batch() -> None:
    placed = plan(batch=8, width=1024, fix={"dp_shard": 4, "zero": 3}).decisions.parameters

    assert {p.placements for p in placed.values()} == {(Shard(0),)}
    assert placed["up.weight"].gather == "none"


def test_zero_three_gathers_small_parameters_together_though_they_outweigh_the_batch() -> None:
    found = plan(batch=8, fix={"dp_shard": 4, "zero": 3})

    assert found.decisions.parameters["up.weight"].gather == "per_phase"
    assert len(found.decisions.collectives) == 4  # moving activations takes eight calls


@pytest.mark.parametrize("fix", [{"tp": 4}, {"pp": 2, "tp": 2}, {"dp_replicate": 4}], ids=str)
def test_zero_three_is_refused_where_no_ranks_are_left_to_shard_over(fix: dict[str, int]) -> None:
    with pytest.raises(InfeasibleError, match=r"--fix zero=3 shards what .* all 4 devices; leave zero out, or make a"):
        plan(fix={**fix, "zero": 3})


def test_zero_three_alone_gets_ranks_to_shard_over() -> None:
    assert plan(fix={"zero": 3}, width=256).decisions.degrees["dp_shard"] > 1
    assert plan("cpu:1", fix={"zero": 3}).decisions.degrees["dp_shard"] == 1


def test_zero_none_keeps_parameters_whole() -> None:
    placed = plan(fix={"zero": 0}, forbid="tp").decisions.parameters

    assert all(p.placements == (Replicate(),) * len(p.placements) for p in placed.values())


def test_a_constraint_places_its_parameter() -> None:
    placed = plan(fix={"tp": 4}, constraint="up.weight=Shard(1)@tp").decisions.parameters

    assert placed["up.weight"].placements == (Shard(1),)


REFUSED = [
    pytest.param(
        {"fix": {"tp": 3}}, InfeasibleError, "3 ranks do not divide the cluster's 4 devices", id="indivisible"
    ),
    pytest.param(
        {"fix": {"tp": 2}, "forbid": ["dp_replicate", "dp_shard", "pp"]},
        InfeasibleError,
        "use 2 of 4 devices",
        id="idle",
    ),
    pytest.param(
        {"constraint": "upp.weight=Shard(0)@tp"},
        UsageError,
        "no parameter 'upp.weight' (did you mean 'up.weight'?)",
        id="typo",
    ),
    pytest.param({"fix": {"tp": 4}, "constraint": "up.weight=Shard(2)@tp"}, InfeasibleError, "cannot be met", id="dim"),
    pytest.param({"fix": {"cp": 2}}, UsageError, "--fix cp=2: no input of the model has a batch", id="context"),
    pytest.param({"fix": {"pp": 2, "schedule": "zb_h1", "interleave": 2}}, UsageError, "has 1 stages a rank", id="zb"),
    pytest.param({"fixx": {"tp": 2}}, UsageError, "unknown option 'fixx'", id="option"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(
    options: dict[str, object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        plan(**options)

    assert text in str(caught.value)


@pytest.mark.parametrize("fix", [{}, {"microbatch": 2}, {"pp": 2}], ids=str)
def test_a_type_that_the_devices_do_not_compute_in_is_the_reason(fix: dict[str, int]) -> None:
    with pytest.raises(InfeasibleError, match="no compute rate for 'bfloat16'; known: float16, float32, float64"):
        plan("v100-16gb:2", precision="bf16", fix=fix)


def test_ranks_that_divide_no_parameter_are_named_where_nothing_fits() -> None:
    with torch.device("meta"):
        sizes = [(32768, 96), (96, 32768), *[(32768, 32768)] * 8]
        model, x = nn.Sequential(*(nn.Linear(*each) for each in sizes)), torch.empty(72, 32768)

    with pytest.raises(InfeasibleError) as odd:
        autopar.plan(model, "rtx-4090:6", example_inputs=(x,), fix={"tp": 6})
    with pytest.raises(InfeasibleError) as even:
        autopar.plan(model, "rtx-4090:4", example_inputs=(x,), fix={"tp": 4})
    with pytest.raises(InfeasibleError) as padded:
        autopar.plan(model, "rtx-4090:6", example_inputs=(x,), fix={"dp_shard": 6})

    assert (
        "6 ranks of tp divide no dimension of 32.00 GiB of the parameters' 32.02 GiB (2.weight: 32768 x 32768), "
        "which all of them hold whole; 2 of them would, and the other factor 3 could be pipeline stages (--fix pp=3)."
    ) in str(odd.value)
    for each in (even, padded):
        assert "no plan fits" in str(each.value)
        assert "divide no dimension" not in str(each.value)


def test_a_mesh_that_the_model_does_not_divide_by_hides_no_other_where_nothing_fits() -> None:
    """Six tensor-parallel ranks have the most micro-batches, and divide no matrix; nobody asked for them."""
    with pytest.raises(InfeasibleError, match="no plan fits: even the smallest needs") as caught:
        plan("cpu:6", batch=32, memory_margin=0.99999)

    assert "tp=6" not in str(caught.value)


def test_stages_that_do_not_fit_say_how_far_they_are() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32768, 32768) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    with torch.device("meta"):
        model, x = Blocks(), torch.empty(64, 32768)

    with pytest.raises(InfeasibleError, match=r"an average rank holds at least 6\d\.\d+ GiB and may hold 21\.59 GiB"):
        autopar.plan(model, "rtx-4090:2", example_inputs=(x,), fix={"pp": 2})


def test_a_missing_type_is_the_reason_also_where_nothing_fits() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(8))), torch.empty(64, 32768)

    with pytest.raises(InfeasibleError, match="no compute rate for 'bfloat16'; known: float16, float32, float64"):
        autopar.plan(model, "v100-16gb:2", example_inputs=(x,), precision="bf16")


@pytest.mark.parametrize("fix", [{"pp": 2}, {"microbatch": 2}], ids=str)
def test_time_that_ends_before_anything_is_tried_leaves_a_plan(fix: dict[str, int]) -> None:
    late = plan(fix=fix, time_limit=1e-6)

    assert late.solver.status == "time_limit"
    assert fix.items() <= {**late.decisions.degrees, "microbatch": late.workload.microbatch}.items()
    assert late.solver.bound <= plan(fix=fix).solver.objective * (1 + 1e-9)


def test_what_does_not_fit_says_how_far_it_is_and_what_would_fit() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(8))), torch.empty(64, 32768)

    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(model, "rtx-4090:2", example_inputs=(x,))

    text = str(caught.value)
    assert "no plan fits: even the smallest needs" in text
    assert "21.59 GiB" in text
    assert "0.weight" in text or ".weight" in text
    assert "What would make it fit: " in text
    assert "other choices" not in text


def test_where_wishes_are_why_nothing_fits_they_are_told_as_what_to_change() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(16))), torch.empty(64, 8192)

    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(model, "t4:4", example_inputs=(x,), fix={"dp_replicate": 4, "zero": 0})

    said = "other choices than --fix dp_replicate=4 --fix zero=0, with which this is the smallest plan"
    assert f"What would make it fit: {said}; " in str(caught.value)
    assert autopar.plan(model, "t4:4", example_inputs=(x,)).decisions.degrees["dp_replicate"] == 1


def test_mixed_devices_without_stages_are_planned_with_a_warning_that_names_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "version: 1\nname: mixed\n"
        "devices: {a: {preset: a100-sxm-80gb}, h: {preset: h100-sxm-80gb}}\n"
        "nodes:\n"
        "  na: {device: a, count: 2, links: {bandwidth: 300GB/s, latency: 1us, topology: switch}, "
        "nic: {bandwidth: 200Gbit/s, latency: 5us}}\n"
        "  nh: {device: h, count: 2, links: {bandwidth: 450GB/s, latency: 1us, topology: switch}, "
        "nic: {bandwidth: 400Gbit/s, latency: 5us}}\n"
        "groups: [{node: na, count: 1}, {node: nh, count: 1}]\n"
        "network: [{level: pod, topology: fat-tree, latency: 5us}]\n"
    )

    made = plan(str(path), fix={"pp": 1})

    (warned,) = [each for each in made.warnings if each.code == "unlike-devices"]
    assert warned.text.startswith("2 x a, 2 x h work in step")


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InfeasibleError) as error:
        plan(batch=6, fix={"dp_shard": 4})

    assert str(error.value) == (
        "--fix dp_shard=4: the batch of 6 (dimension 0 of the inputs) does not divide into 4 equal parts; take a batch "
        "of 4 or 8, or lower degrees"
    )


def test_samples_in_a_list_are_to_be_stacked() -> None:
    class Images(nn.Linear):
        def forward(self, images: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(torch.stack(images).mean((2, 3))), y)

    batch = ([torch.randn(3, 8, 8) for _ in range(4)], torch.randint(2, (4,)))

    with pytest.raises(
        InfeasibleError,
        match=r"the batch of 3 \(dimension 0 of 4 of 5 inputs\) .* time first have to be .* have to be stacked",
    ):
        autopar.plan(Images(3, 2), "cpu:2", example_inputs=batch, fix={"dp_replicate": 2})


def test_a_tensor_degree_that_divides_nothing_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(7, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum()

    with torch.device("meta"):
        model, x = Odd(), torch.empty(8, 7)
    with pytest.raises(InfeasibleError, match=r"--fix tp=4: no matrix among the parameters .* divides by 4; choose"):
        autopar.plan(model, "cpu:4", example_inputs=(x,), fix={"tp": 4})


def test_stages_whose_ranks_divide_nothing_are_refused_in_the_users_terms() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    with torch.device("meta"):
        model, x = Layers(), torch.empty(8, 8)
    with pytest.raises(InfeasibleError, match=r"--fix pp=2 leaves 3 of 6 devices .* batch of 8.* \(tp=3: no matrix"):
        autopar.plan(model, "cpu:6", example_inputs=(x,), fix={"pp": 2})


@pytest.mark.parametrize(("wanted", "placement"), [(True, Shard(1)), (False, Replicate())])
def test_sequence_parallelism_decides_where_normalisation_happens(wanted: bool, placement: object) -> None:
    model, inputs, _ = zoo.build("gpt-tiny", batch=4, seq=32, overrides={})

    found = autopar.plan(model, "cpu:2", example_inputs=inputs, fix={"tp": 2, "sequence_parallel": wanted})

    norms = [op for op in found.decisions.operators.values() if op.target == "aten.native_layer_norm.default"]
    assert norms
    assert {op.strategy.outputs[0] for op in norms} == {(placement,)}


def test_sequence_parallelism_needs_sequences() -> None:
    with pytest.raises(UsageError, match="no input of the model has a batch and a sequence dimension"):
        plan(fix={"tp": 4, "sequence_parallel": True})
