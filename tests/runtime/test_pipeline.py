"""Pipeline steps of a chain of layers on real gloo ranks equal the model's own steps on one device."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import InputMismatchError
from autopar.ir.schedule import PipelineSchedule
from autopar.runtime import pipeline_ranks
from autopar.runtime.clipping import clip_grad_norm_
from autopar.runtime.errors import PeerLostError
from autopar.runtime.pipeline_step import Step
from autopar.runtime.stand_ins import Elsewhere
from autopar.simulate.generators import generate
from tests.support.chain import WIDTH, Chain, Layers, compile_staged
from tests.support.decide import mesh_of
from tests.support.ranks import RankPool

FOUR = ((0,), (1,), (2,), (3,))
TWO = ((0, 1), (2, 3))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets, and which rows count: unequally many in the micro-batches."""
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y, (torch.arange(rows) % 5 < 3).double()


def train(model: nn.Module, data: Any, steps: int = 2) -> list[float]:
    """Take AdamW steps and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*data)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(
    rank: int, layers: Layers, schedule: PipelineSchedule, ordered: bool = False, blocks: Sequence[Sequence[int]] = ()
) -> tuple[list[str], list[str]]:
    """Train the chain as a pipeline and alone; return the names this rank holds, of parameters and of all."""
    data = batch(layers.rows * schedule.microbatches)
    reference = Chain(layers.count, layers.skip, tied=layers.tied)
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule, ordered=ordered, blocks=blocks)

    want, got = train(reference, data), train(mine, data)

    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    whole = reference.state_dict(keep_vars=True)
    for name, value in mine.state_dict(keep_vars=True).items():
        if name != "calls":
            torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(value.grad, whole[name].grad, rtol=1e-6, atol=1e-9)
    return [name for name, _ in mine.named_parameters()], list(mine.state_dict())


CASES = {
    "gpipe": (Layers(TWO, 2), generate("gpipe", ranks=2, microbatches=4)),
    "1f1b": (Layers(TWO, 2), generate("1f1b", ranks=2, microbatches=4)),
    "1f1b, 3 micro-batches": (Layers(TWO, 3), generate("1f1b", ranks=2, microbatches=3)),
    "1f1b, 1 micro-batch": (Layers(TWO, 4), generate("1f1b", ranks=2, microbatches=1)),
    "interleaved": (Layers(FOUR, 2), generate("interleaved_1f1b", ranks=2, microbatches=4, interleave=2)),
    "interleaved, 5 micro-batches": (Layers(FOUR, 1), generate("interleaved_1f1b", ranks=2, microbatches=5)),
    "zb_h1": (Layers(TWO, 2, split=True), generate("zb_h1", ranks=2, microbatches=4)),
    "zb_h1, backward in one": (Layers(TWO, 2), generate("zb_h1", ranks=2, microbatches=4)),
    "1f1b, backward in two": (Layers(TWO, 2, split=True), generate("1f1b", ranks=2, microbatches=4)),
    "zbv": (Layers(FOUR, 2, split=True), generate("zbv", ranks=2, microbatches=4)),
    "skip to another rank": (Layers(FOUR, 2, skip=3), generate("interleaved_1f1b", ranks=2, microbatches=4)),
    "skip to the same rank": (Layers(FOUR, 2, skip=2), generate("interleaved_1f1b", ranks=2, microbatches=4)),
    "tied": (Layers(TWO, 2, tied=True), generate("1f1b", ranks=2, microbatches=4)),
    "tied on one rank": (Layers(FOUR, 2, tied=True, split=True), generate("zbv", ranks=2, microbatches=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_the_models_own(pool: RankPool, name: str):
    layers, schedule = CASES[name]

    (first, states), (second, others) = pool.values(compare, layers, schedule)

    everything = Chain(layers.count, tied=layers.tied)
    assert {*first, *second} == {name for name, _ in everything.named_parameters()}
    assert {*states, *others} == set(everything.state_dict())
    assert bool(set(first) & set(second)) == (name == "tied")


@pytest.mark.parametrize("name", ["1f1b, 3 micro-batches", "zbv", "skip to another rank"])
def test_messages_in_one_order_on_all_ranks_give_the_same(pool: RankPool, name: str):
    pool.values(compare, *CASES[name], True)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "skip to another rank", "tied"])
def test_stages_on_ranks_in_another_order_equal_the_models_own(pool: RankPool, name: str):
    layers, schedule = CASES[name]

    (first, _), (second, _) = pool.values(compare, layers, schedule, name == "zbv", ((1,), (0,)))
    (one, _), (other, _) = pool.values(compare, layers, schedule)

    assert (first, second) == (other, one)


def clipped(rank: int) -> None:
    """Take a step's gradients of tied stages in reversed order, and compare the norm over all stages."""
    layers, schedule = CASES["tied"]
    data, reference = batch(8), Chain(tied=True)
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule, blocks=((1,), (0,)))
    for model in (mine, reference):
        model(*data)[1].backward()
    norms = [clip_grad_norm_(model, 0.1) for model in (mine, reference)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-9, atol=0)


def test_the_norm_counts_a_tied_parameter_once_whatever_the_order_of_ranks(pool: RankPool):
    pool.values(clipped)


def tied_bits(rank: int) -> torch.Tensor:
    layers, schedule = CASES["tied"]
    mine, _ = compile_staged(Chain(tied=True), layers, schedule)
    train(mine, batch(8), steps=3)
    return mine.w[0 if rank == 0 else 3].detach()


def test_a_tied_parameter_stays_bit_equal_on_its_stages(pool: RankPool):
    first, second = pool.values(tied_bits)

    assert torch.equal(first, second)


def live(rank: int, microbatches: int) -> int:
    """Return the most activations and gradients of a micro-batch that are alive at once after any action."""
    schedule = generate("1f1b", ranks=2, microbatches=microbatches)
    mine, _ = compile_staged(Chain(), Layers(TWO, 7), schedule)
    counts = []
    take = Step._take

    def counting(step: Step, *args: Any) -> None:
        take(step, *args)
        del args
        shape = (7, WIDTH)
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]
        counts.append(sum(not each._is_view() for each in tensors))

    Step._take = counting
    try:
        mine(*batch(7 * microbatches))
    finally:
        Step._take = take
    return max(counts)


def test_the_first_stage_of_1f1b_holds_no_more_for_more_micro_batches(pool: RankPool):
    few, many = (pool.values(live, microbatches)[0] for microbatches in (4, 12))

    assert few == many


def accumulate(rank: int) -> None:
    layers, schedule = Layers(((0, 1, 2, 3),), 2), generate("1f1b", ranks=1, microbatches=4)
    data = batch(8)
    reference = Chain()
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule)
    torch.testing.assert_close(train(mine, data), train(reference, data), rtol=1e-9, atol=0)
    prediction, loss = mine(*data)
    assert type(prediction) is torch.Tensor
    want = reference(*data)
    torch.testing.assert_close((prediction, loss), want)


def test_one_rank_accumulates_the_gradients_of_its_micro_batches():
    with RankPool(1) as pool:
        pool.values(accumulate)


def evaluate(rank: int) -> None:
    layers, schedule = CASES["interleaved"]
    data = batch(8)
    reference = Chain()
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule)
    mine.eval()
    with torch.no_grad():
        prediction, loss = mine(*data)

    want, want_loss = reference(*data)
    torch.testing.assert_close(loss, want_loss.detach())
    assert not loss.requires_grad
    assert prediction.shape == want.shape
    if rank:
        torch.testing.assert_close(prediction.to_local(), want.detach())
    else:
        assert isinstance(prediction, Elsewhere)
        assert mine.calls.item() == 1  # as on one device, however many micro-batches


def test_without_gradients_only_forwards_run_and_the_last_stage_holds_the_larger_output(pool: RankPool):
    pool.values(evaluate)


def scale(rank: int) -> None:
    layers, schedule = CASES["1f1b"]
    data = batch(8)
    mine, _ = compile_staged(Chain(), layers, schedule)
    parameters = list(mine.parameters())
    plain = torch.autograd.grad(mine(*data)[1], parameters)
    prediction, loss = mine(*data)
    scaled = torch.autograd.grad(loss * 8, parameters, retain_graph=True)
    again = torch.autograd.grad(loss * 2, parameters)
    for one, eight, two in zip(plain, scaled, again, strict=True):
        torch.testing.assert_close((eight, two), (one * 8, one * 2))
    prediction, loss = mine(*data)
    if rank:  # where the output is
        with pytest.raises(InputMismatchError, match="a gradient arrived at the model's output 'pred'"):
            (loss + prediction.to_local().sum()).backward()


def test_a_scaled_loss_scales_the_gradients_also_twice(pool: RankPool):
    pool.values(scale)


def input_gradient(rank: int) -> None:
    layers, schedule = CASES["1f1b"]
    reference = Chain()
    mine, _ = compile_staged(copy.deepcopy(reference), replace(layers, input_gradient=True), schedule)
    x, y, mask = batch(8)
    given, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    reference(given, y, mask)[1].backward()
    mine(own, y, mask)[1].backward()
    torch.testing.assert_close(own.grad, given.grad)


def test_the_gradient_of_an_input_is_on_every_rank(pool: RankPool):
    pool.values(input_gradient)


def drop(rank: int, name: str, dropout: float) -> tuple[float, float, dict[str, torch.Tensor]]:
    layers, schedule = CASES[name]
    mine, _ = compile_staged(Chain(), replace(layers, dropout=dropout), schedule)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        loss = mine(*batch(8))[1]
        losses.append(loss.item())
    loss.backward()
    return *losses, {name: each.grad for name, each in mine.named_parameters()}


def test_dropout_is_the_same_however_the_stages_lie_and_differs_between_micro_batches(pool: RankPool):
    found = [pool.values(drop, name, 0.5) for name in ("gpipe", "interleaved")]

    assert len({loss for ranks in found for *losses, _ in ranks for loss in losses}) == 1
    gpipe, interleaved = ({k: v for *_, grads in ranks for k, v in grads.items()} for ranks in found)
    torch.testing.assert_close(gpipe, interleaved)
    assert found[0][0][0] != pool.values(drop, "gpipe", 0.0)[0][0]


def load(rank: int) -> None:
    layers, schedule = CASES["tied"]
    torch.manual_seed(1)
    model = Chain(tied=True)
    mine, _ = compile_staged(Chain(tied=True), layers, schedule)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    mine.load_state_dict(model.state_dict())

    for name, value in mine.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other\.weight"):
        mine.load_state_dict({**model.state_dict(), "other.weight": torch.zeros(3)})


def test_a_stage_loads_its_part_of_a_whole_state_dict(pool: RankPool):
    pool.values(load)


def from_meta(rank: int) -> list[str]:
    def initialise(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    layers, schedule = CASES["1f1b"]
    want = Chain()
    torch.manual_seed(7)
    for module in want.modules():
        initialise(module)
    torch.manual_seed(7 + rank)
    mine, _ = compile_staged(Chain().to("meta"), layers, schedule, init_fn=initialise)
    for name, value in mine.state_dict().items():
        assert torch.equal(value, want.state_dict()[name])
    return list(mine.state_dict())


def test_stages_of_a_model_on_meta_draw_the_values_of_one_device(pool: RankPool):
    first, second = pool.values(from_meta)

    assert not set(first) & set(second)


def sharded(rank: int, microbatches: int, whole: bool) -> None:
    """Two stages of two ranks each, which bring the batch whole or their halves of it."""
    layers = Layers(TWO, 2, reduce="dp", part=rank % 2 if whole else None)
    reference = Chain()
    schedule = generate("1f1b", ranks=2, microbatches=microbatches)
    mine, _ = compile_staged(copy.deepcopy(reference), layers, schedule, mesh_of(dp=2))
    data = batch(4 * microbatches)
    own = data if whole else [each.chunk(2)[rank % 2] for each in data]

    torch.testing.assert_close(train(mine, own), train(reference, data), rtol=1e-9, atol=0)

    values = reference.state_dict(keep_vars=True)
    for key, value in mine.named_parameters():
        torch.testing.assert_close(value.full_tensor(), values[key], rtol=1e-6, atol=1e-9)
        assert value.grad.placements == value.placements
    prediction, loss = mine(*own)
    want, want_loss = reference(*data)
    if rank > 1:
        torch.testing.assert_close(prediction.to_local(), want.chunk(2)[rank % 2])
    torch.testing.assert_close(loss, want_loss)


def test_stages_that_are_meshes_reduce_gradients_once_and_hold_rows_of_outputs_in_order():
    with RankPool(4) as ranks:
        for microbatches, whole in ((4, False), (4, True), (3, True)):
            ranks.values(sharded, microbatches, whole)


def stop(rank: int, how: str) -> str:
    """Rank 1 ends, or stands still, in the middle of its second step; return rank 0's error."""
    pipeline_ranks.group_timeout = lambda device: timedelta(seconds=3)
    layers, schedule = CASES["1f1b"]
    mine, runner = compile_staged(Chain(), layers, schedule)
    train(mine, batch(8), steps=1)
    if rank == 1:
        stage = runner._known[True, True][0]._ways[True].stages[1]
        run = stage.run

        def stopping(kind: str, microbatch: int, *rest: Any) -> Any:
            if (kind, microbatch) == ("B", 2):
                os._exit(1) if how == "killed" else time.sleep(6)
            return run(kind, microbatch, *rest)

        stage.run = stopping
        train(mine, batch(8), steps=1)
    with pytest.raises(PeerLostError) as error:
        train(mine, batch(8), steps=1)
    with pytest.raises(PeerLostError, match="an earlier step of this pipeline failed"):
        mine(*batch(8))
    return str(error.value)


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_rank_that_stops_is_named_with_what_was_waited_for(how: str):
    with RankPool(2) as ranks:
        start = time.monotonic()
        first = ranks.run(stop, how, may_die=True)[0]
        assert time.monotonic() - start < 50

    assert not first.error, first.trace
    wanted = "rank 1 (stage 1) did not send 'g2', needed for the backward of stage 0, micro-batch 2: "
    assert first.value.startswith(wanted)
    why = "its connection closed" if how == "killed" else "nothing came for 3 s"
    assert first.value.removeprefix(wanted).startswith(f"{why}\n"), first
