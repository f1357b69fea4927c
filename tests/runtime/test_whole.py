"""DTensors where a single-device loop has tensors: outputs, losses made of them, and what other models are given."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.runtime.stand_ins import Elsewhere
from tests.support.ranks import RankPool

SPLITS = [{"dp_shard": 2}, {"tp": 2}]
STAGES = {"pp": 2, "microbatch": 2}


class Classifier(nn.Module):
    """Layers that make logits, and with labels a loss beside them."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(2))
        self.head = nn.Linear(features, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return logits, or loss and logits."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 8, generator=generator), torch.randint(6, (8,), generator=generator)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _pair(example: Any, model: nn.Module | None = None, **how: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = model or Classifier()
    return model, autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=example, **how)


def _gradients_differ(model: nn.Module, mine: nn.Module) -> float:
    """Return the largest relative difference of a gradient that this rank holds."""
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    held = {name: _whole(each.grad) for name, each in mine.named_parameters() if each.grad is not None}
    return max(((held[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in held)


def loss_outside(_rank: int, fix: dict[str, Any]) -> tuple[float, float, float]:
    """Return the loss, the difference of its value, and that of gradients, of a loss made of whole outputs."""
    x, labels = _batch()
    model, mine = _pair((x,), fix=fix, outputs="whole")
    losses = [F.cross_entropy(each(x), labels, label_smoothing=0.1) for each in (model, mine)]
    for loss in losses:
        loss.backward()
    return losses[1].item(), losses[1].item() - losses[0].item(), _gradients_differ(model, mine)


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_a_loss_of_whole_outputs_and_its_gradients_are_those_of_one_device(pool: RankPool, fix: dict[str, Any]):
    told = pool.values(loss_outside, fix)

    assert told[0][0] == told[1][0]
    for _, loss, gradients in told:
        assert abs(loss) < 1e-6
        assert gradients < 1e-5


def metric(_rank: int, fix: dict[str, Any]) -> tuple[bool, float]:
    """Return whether the logits beside a loss are plain, and the difference of their norm."""
    model, mine = _pair(_batch(), fix=fix, outputs="whole")
    (_, wanted), (_, got) = model(*_batch()), mine(*_batch())
    return type(got) is torch.Tensor, (got.norm() / wanted.norm()).item() - 1


@pytest.mark.parametrize("fix", [*SPLITS, STAGES], ids=str)
def test_whole_outputs_beside_a_loss_are_plain_tensors_on_every_rank(pool: RankPool, fix: dict[str, Any]):
    for plain, norm in pool.values(metric, fix):
        assert plain
        assert abs(norm) < 1e-6


def number_of_a_part(_rank: int) -> float:
    """Return the mean of logits of which this rank has a few rows."""
    x, _ = _batch()
    return _pair((x,), fix={"dp_shard": 2})[1](x).mean().item()


def test_a_number_of_a_part_is_refused_with_the_way_out(pool: RankPool):
    for outcome in pool.run(number_of_a_part):
        assert outcome.kind == UsageError.__name__
        assert "DTensor held as Partial(avg): this rank has its own part" in outcome.error
        assert "outputs='whole'" in outcome.error


def stepped_by_data(_rank: int, fix: dict[str, Any], features: int) -> float:
    """Return how far parameters are from one device's where a loop assigns `.data`, of gradients and parameters."""
    x, labels = _batch()
    batch = (x[:, :features], labels)
    model, mine = _pair(batch, model=Classifier(features), fix=fix)
    for each in (model, mine):
        each(*batch)[0].backward()
        for parameter in each.parameters():
            parameter.grad.data = 2 * parameter.grad.data
            parameter.data = parameter.data - 0.1 * parameter.grad.data
        each.layers[0].bias.data = torch.arange(features).float()
        each.head.weight.data = each.head.weight.data * each.head.weight.data.norm()
    wanted = {name: each.detach() for name, each in model.named_parameters()}
    return max((_whole(each.detach()) - wanted[name]).abs().max().item() for name, each in mine.named_parameters())


@pytest.mark.parametrize("features", [8, 5], ids="{} features".format)
@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_what_a_loop_assigns_to_data_is_what_parameters_become(pool: RankPool, fix: dict[str, Any], features: int):
    for apart in pool.values(stepped_by_data, fix, features):
        assert apart < 1e-6


def halved_as_a_vector(_rank: int, fix: dict[str, Any]) -> float:
    """Return how far parameters are from half of what they were, after torch's functions for one vector of all."""
    model, mine = _pair(_batch(), fix=fix)
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(mine.parameters())
        nn.utils.vector_to_parameters(0.5 * vector, mine.parameters())
    wanted = {name: each.detach() / 2 for name, each in model.named_parameters()}
    return max((_whole(each.detach()) - wanted[name]).abs().max().item() for name, each in mine.named_parameters())


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_parameters_take_the_parts_of_a_vector_of_all(pool: RankPool, fix: dict[str, Any]):
    for apart in pool.values(halved_as_a_vector, fix):
        assert apart < 1e-7


def data_of_another_form(_rank: int, given: torch.Tensor) -> None:
    """Assign a value to a bias of eight numbers."""
    _pair(_batch(), fix={"tp": 2})[1].layers[0].bias.data = given


@pytest.mark.parametrize("given", [torch.zeros(3), torch.zeros(8, dtype=torch.float64)], ids=["shape", "type"])
def test_data_of_another_form_is_refused_with_both(pool: RankPool, given: torch.Tensor):
    for outcome in pool.run(data_of_another_form, given):
        assert outcome.kind == UsageError.__name__
        assert "a tensor of [8] of torch.float32 is assigned .data of" in outcome.error
        assert f"{list(given.shape)} of {given.dtype}: convert that, or compile what is changed" in outcome.error


def clipped(_rank: int, fix: dict[str, Any]) -> tuple[float, float]:
    """Return the difference of the gradients' norm, read as a number, and that of the clipped gradients."""
    model, mine = _pair(_batch(), fix=fix)
    norms = []
    for each in (model, mine):
        each(*_batch())[0].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1).item())
    return norms[1] / norms[0] - 1, _gradients_differ(model, mine)


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_the_norm_that_clipping_returns_is_that_of_the_whole_model(pool: RankPool, fix: dict[str, Any]):
    for norm, gradients in pool.values(clipped, fix):
        assert abs(norm) < 1e-5
        assert gradients < 1e-5


def penalised(_rank: int, fix: dict[str, Any]) -> float:
    """Return the difference of gradients where the loop adds a penalty on the parameters to the loss."""
    model, mine = _pair(_batch(), fix=fix)
    for each in (model, mine):
        (each(*_batch())[0] + 0.1 * sum(p.square().sum() for p in each.parameters())).backward()
    return _gradients_differ(model, mine)


@pytest.mark.parametrize("fix", [*SPLITS, STAGES], ids=str)
def test_a_penalty_on_parameters_may_be_added_to_the_loss(pool: RankPool, fix: dict[str, Any]):
    assert max(pool.values(penalised, fix)) < 1e-5


def under_anomaly_detection(_rank: int, fix: dict[str, Any]) -> tuple[float, str]:
    """Return the difference of gradients under anomaly detection, and what it says of a gradient that is no number."""
    model, mine = _pair(_batch(), fix=fix)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        for each in (model, mine):
            each(*_batch())[0].backward()
        try:
            (mine(*_batch())[0] * torch.nan).backward()
        except RuntimeError as error:
            return _gradients_differ(model, mine), str(error)
    return _gradients_differ(model, mine), ""


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_anomaly_detection_looks_at_split_gradients(pool: RankPool, fix: dict[str, Any]):
    for gradients, found in pool.values(under_anomaly_detection, fix):
        assert gradients < 1e-5
        assert "returned nan values" in found


def chained(_rank: int, fix: dict[str, Any]) -> tuple[float, float]:
    """Return the differences of both models' gradients where one is given the other's outputs."""
    x, labels = _batch()
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    first, my_first = _pair((x,), body, fix=fix)
    second, my_second = _pair((x.clone().requires_grad_(), labels), fix=fix)
    for one, other in ((first, second), (my_first, my_second)):
        other(one(x), labels)[0].backward()
    return _gradients_differ(first, my_first), _gradients_differ(second, my_second)


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_outputs_of_one_compiled_model_are_inputs_of_another(pool: RankPool, fix: dict[str, Any]):
    for differences in pool.values(chained, fix):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_an_input_that_requires_a_gradient_gets_one_also_where_the_example_required_none(training: bool):
    x, labels = _batch()
    mine = autopar.compile(Classifier(), "cpu:1", example_inputs=(x, labels)).train(training)
    graded = x.clone().requires_grad_()

    with torch.no_grad():
        mine(graded, labels)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mine(graded, labels)[0].backward()
    assert graded.grad is not None
    assert [str(each.message).partition(":")[0] for each in told] == (
        ["argument x requires a gradient, and the plan was made for one that requires none"] if training else []
    )


def test_an_input_with_a_gradient_in_the_example_gets_it_and_needs_none_later():
    x, labels = _batch()
    model = Classifier()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(x.clone().requires_grad_(), labels))
    mine(x, labels)[0].backward()
    graded = [x.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((model, mine), graded, strict=True):
        each(given, labels)[0].backward()

    torch.testing.assert_close(graded[1].grad, graded[0].grad)


def test_an_unknown_form_of_outputs_is_refused():
    with pytest.raises(UsageError, match=r"outputs='hole' is unknown \(did you mean 'whole'\?\)"):
        autopar.compile(Classifier(), "cpu:1", outputs="hole")


USES: dict[str, Callable[[Any], Any]] = {
    "operator": lambda x: x.softmax(-1),
    "function": lambda x: torch.argmax(x, -1),
    "list": lambda x: torch.stack([x, x]),
    "number": lambda x: x.mean().item(),
    "arithmetic": lambda x: 2.0 * x,
    "element": lambda x: x[0],
    "truth": bool,
    "whole": lambda x: x.full_tensor(),
}


def read_elsewhere(rank: int, grad: bool) -> tuple[dict[str, str], tuple[int, ...], torch.dtype]:
    """Return what each use of the logits says here, their shape and their type."""
    _, mine = _pair(_batch(), fix=STAGES)
    with torch.set_grad_enabled(grad):
        logits = mine(*_batch())[1].detach()
    told = {}
    for name, use in USES.items():
        with suppress(RuntimeError):  # `bool` of many numbers, where they are
            try:
                use(logits)
            except AutoparError as error:
                told[name] = str(error)
    return told, tuple(logits.shape), logits.dtype


@pytest.mark.parametrize("grad", [True, False])
def test_an_output_of_another_stage_says_where_it_is_and_how_to_have_it_here(pool: RankPool, grad: bool):
    (first, *form), (last, *same) = pool.values(read_elsewhere, grad)

    assert (first.keys(), last) == (USES.keys(), {})
    for text in first.values():
        assert "pipeline stage that this rank does not have; it is on rank 1" in text
        assert "outputs='whole'" in text
    assert form == same == [(8, 6), torch.float32]


def test_what_stands_for_an_output_is_no_sequence_to_code_that_asks():
    output = Elsewhere("logits", (8, 6), torch.float32, (2, 3))

    with pytest.raises(TypeError, match="it is on ranks 2, 3"):
        iter(output)
    assert repr(output) == "<logits: [8, 6] on ranks 2, 3>"


class Writer(Classifier):
    """Writes on from what it is given, as `generate` of transformers' models does."""

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the kinds chosen at each step, rows by steps."""
        kinds = []
        for _ in range(steps):
            kinds.append(self(x).argmax(-1))
            x = torch.cat([x[:, 1:], kinds[-1].unsqueeze(-1).to(x.dtype)], dim=1)
        return torch.stack(kinds, dim=1)


def generated(_rank: int, fix: dict[str, Any]) -> tuple[bool, bool, str]:
    """Return whether a model that trains generates what one device does, then trains on, and its outputs' kind."""
    x, labels = _batch()
    model, mine = _pair((x, labels), Writer(), fix=fix)
    with torch.no_grad():
        same = [torch.equal(mine.generate(x, 3), model.generate(x, 3)) for _ in range(2)]
        again = copy.deepcopy(mine)
        same.append(torch.equal(again.generate(x, 3), model.generate(x, 3)))
    loss, logits = mine(x, labels)
    loss.backward()
    return all(same), bool(torch.isclose(loss, model(x, labels)[0])), type(logits).__name__


@pytest.mark.parametrize(
    ("fix", "wanted"),
    # With tp, the loss is computed of logits that all ranks have whole.
    [({"dp_shard": 2}, ["DTensor"]), ({"tp": 2}, ["Tensor"]), (STAGES, ["DTensor", "Elsewhere"])],
    ids=str,
)
def test_generate_reads_whole_outputs_on_all_ranks_and_other_calls_do_not(
    pool: RankPool, fix: dict[str, Any], wanted: list[str]
):
    kinds = set()
    for same, trains, kind in pool.values(generated, fix):
        assert same
        assert trains
        kinds.add(kind)
    assert sorted(kinds) == wanted
