"""What a model returns beside its loss, over the micro-batches of a step: kept if it fits, and then counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import InfeasibleError
from autopar.runtime.stand_ins import OutputDroppedError

ROWS, CLASSES, MICRO = 1024, 4096, 64
LOGITS_BYTES = ROWS * CLASSES * 4


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).relu())
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


def example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randn(ROWS, 32), torch.randint(CLASSES, (ROWS,)))


def plan(*, cluster: str = "cpu:1", **options: object) -> autopar.Plan:
    model, inputs = example()
    fix = {"microbatch": MICRO} | ({"pp": 2} if cluster == "cpu:2" else {})
    return autopar.plan(model, cluster, example_inputs=inputs, fix=fix, **options)


def tight_margin(kept: autopar.Plan) -> float:
    """The margin that leaves room for the step and half the outputs."""
    wanted = kept.estimates.peak_memory_bytes - LOGITS_BYTES // 2
    return 1.0 - 0.9 * wanted / kept.estimates.memory_budget_bytes


@pytest.mark.parametrize("cluster", ["cpu:1", "cpu:2"])
def test_outputs_are_dropped_where_they_do_not_fit_and_are_counted_where_they_do(cluster: str):
    kept = plan(cluster=cluster)
    asked_off = plan(cluster=cluster, keep_outputs=False)

    tight = plan(cluster=cluster, memory_margin=tight_margin(kept))

    assert kept.decisions.outputs_dropped == ()
    assert asked_off.decisions.outputs_dropped == tight.decisions.outputs_dropped == ("logits",)
    more = kept.estimates.peak_memory_bytes - asked_off.estimates.peak_memory_bytes
    if cluster == "cpu:1":
        assert more == LOGITS_BYTES
    else:
        assert 0 < more <= LOGITS_BYTES  # the rank without the head may be the fuller one when nothing is kept
    (warned,) = (each.text for each in tight.warnings if each.code == "outputs-dropped")
    assert warned == (
        "training steps return the loss without logits: kept over 16 micro-batches that is 16.00 MiB a device, for "
        "which there is no room; calls under torch.no_grad() return all, and --keep-outputs demands it of training"
    )
    assert not [each for each in asked_off.warnings if each.code == "outputs-dropped"]


def test_outputs_that_are_demanded_and_do_not_fit_are_an_error_with_both_figures():
    margin = tight_margin(plan())

    with pytest.raises(
        InfeasibleError, match=r"--keep-outputs: .*\(logits 16\.00 MiB a device over 16 micro-batches\)"
    ):
        plan(memory_margin=margin, keep_outputs=True)


def test_a_dropped_output_says_so_when_it_is_read_and_the_step_is_the_same():
    model, inputs = example()
    whole = model(*inputs)
    whole["loss"].backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    made, compiled_plan = example()[0], plan(keep_outputs=False)
    compiled = autopar.compile(made, "cpu:1", example_inputs=inputs, plan=compiled_plan)

    found = compiled(*inputs)
    found["loss"].backward()

    for mine, other in zip(compiled.parameters(), wanted, strict=True):
        torch.testing.assert_close(mine.grad, other)
    message = r"the output logits is not kept over the 16 micro-batches of a step"
    for use in (lambda x: x.argmax(-1), lambda x: torch.softmax(x, -1), lambda x: x[0], lambda x: x * 2.0, len):
        with pytest.raises(OutputDroppedError, match=message):
            use(found["logits"])
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs)["logits"], whole["logits"])


def test_kept_outputs_are_those_of_the_whole_batch():
    model, inputs = example()
    compiled = autopar.compile(model, "cpu:1", example_inputs=inputs, plan=plan())

    torch.testing.assert_close(compiled(*inputs)["logits"], example()[0](*inputs)["logits"])
