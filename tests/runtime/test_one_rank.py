"""The compiled module on one rank, without torchrun or a process group: it behaves as the model does."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from autopar.errors import InputMismatchError, UsageError
from autopar.runtime.executable import inductor_graph
from tests.support.compiling import compile_with
from tests.support.decide import mesh_of
from tests.support.models import Mlp, Plain, Tied, Twin, Vision, cases

ALONE = mesh_of()


def call(model: nn.Module, example):
    return model(**example) if isinstance(example, dict) else model(*example)


def loss_of(result) -> torch.Tensor:
    if isinstance(result, dict):
        return result["loss"]
    if isinstance(result, tuple):
        return result[-1]
    return result if result.ndim == 0 else result.square().mean()


@pytest.mark.parametrize("name", ["mlp", "plain", "vision", "tied"])
def test_three_steps_equal_the_models_own(name: str):
    model, example = cases()[name]
    mine = compile_with(copy.deepcopy(model), example, ALONE)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, mine)]

    for _ in range(3):
        losses = [loss_of(call(each, example)) for each in (model, mine)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0])

    for (name_, want), (own, got) in zip(model.state_dict().items(), mine.state_dict().items(), strict=True):
        assert name_ == own
        torch.testing.assert_close(got, want, msg=lambda text, own=own: f"{own}: {text}")


@pytest.mark.parametrize("name", ["vision", "tied"])
def test_eval_and_no_grad_equal_the_models_own(name: str):
    model, example = cases()[name]
    mine = compile_with(copy.deepcopy(model), example, ALONE)
    model.eval()
    mine.eval()

    with torch.no_grad():
        want, got = loss_of(call(model, example)), loss_of(call(mine, example))

    torch.testing.assert_close(got, want)
    assert not got.requires_grad
    assert loss_of(call(mine, example)).requires_grad


def test_another_batch_size_is_welcome_and_told_of_in_training():
    model = Plain()
    mine = compile_with(model, (torch.randn(8, 8),), ALONE)

    mine.eval()
    torch.testing.assert_close(mine(torch.ones(3, 8)), model.eval()(torch.ones(3, 8)))
    mine.train()
    with pytest.warns(
        UserWarning, match=r"argument x is float32\[3, 8\], and the plan was made for float32\[8, 8\]: a program for"
    ):
        got = mine(torch.ones(3, 8))
    torch.testing.assert_close(got, model.train()(torch.ones(3, 8)))


def test_an_input_of_another_dtype_is_refused_by_name():
    mine = compile_with(Mlp(), cases()["mlp"][1], ALONE)
    x, y = cases()["mlp"][1]

    with pytest.raises(InputMismatchError, match="argument y is int32"):
        mine(x, y.int())


def test_a_value_that_is_no_tensor_is_refused():
    mine = compile_with(Mlp(), cases()["mlp"][1], ALONE)
    x, _ = cases()["mlp"][1]
    mine(*cases()["mlp"][1])

    with pytest.raises(InputMismatchError, match="argument y is None"):
        mine(x, None)


def test_arguments_may_be_given_by_position_or_name_in_any_order():
    model, (x, y) = cases()["mlp"]
    mine = compile_with(model, (x, y), ALONE)

    want = mine(x, y)[1]

    for _ in range(2):
        assert torch.equal(mine(y=y, x=x)[1], want)
        assert torch.equal(mine(x, y=y)[1], want)
        assert torch.equal(mine(x, y)[1], want)


def test_two_forwards_then_two_backwards_add_up():
    model, (x, y) = cases()["mlp"]
    mine = compile_with(copy.deepcopy(model), (x, y), ALONE)
    for each in (model, mine):
        first, second = each(x, y)[1], each(2 * x, y)[1]
        second.backward()
        first.backward()

    for want, got in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_backward_twice_gives_torchs_own_error_unless_the_graph_is_retained():
    model, (x, y) = cases()["mlp"]
    mine = compile_with(copy.deepcopy(model), (x, y), ALONE)
    loss, want = mine(x, y)[1], model(x, y)[1]

    for each in (loss, want):
        each.backward(retain_graph=True)
        each.backward()

    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_overwriting_a_parameter_before_backward_gives_torchs_own_error():
    mine = compile_with(Mlp(), cases()["mlp"][1], ALONE)
    loss = mine(*cases()["mlp"][1])[1]
    with torch.no_grad():
        mine.down.weight.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("used", [("h",), ("left", "right"), ("right",)])
def test_only_the_outputs_that_are_used_get_gradients(used: tuple[str, ...]):
    model, example = Twin(), (torch.randn(8, 8),)
    mine = compile_with(copy.deepcopy(model), example, ALONE)
    for each in (model, mine):
        result = each(*example)
        torch.stack([result[name].square().sum() for name in used]).sum().backward()

    for (name, want), got in zip(model.named_parameters(), mine.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


def test_inputs_that_require_a_gradient_get_one():
    model, x = Plain(), torch.randn(8, 8, requires_grad=True)
    mine = compile_with(copy.deepcopy(model), (x,), ALONE)

    (want,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(mine(x).sum(), x)

    torch.testing.assert_close(got, want)


def test_inputs_in_another_order_in_memory_are_taken():
    model, x = Plain(), torch.randn(8, 8)
    mine = compile_with(model, (x,), ALONE)

    torch.testing.assert_close(mine(x.t()), mine(x.t().contiguous()))


class Permuted(nn.Module):
    """Kernels of its backward give permuted inputs' gradients in plain order, and fake tensors say permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        mixed = self.norm(self.mix(x).transpose(1, 2))
        return nn.functional.mse_loss(self.last(mixed.transpose(1, 2)).transpose(1, 2), y)


def test_gradients_are_viewed_whatever_their_kernels_make_of_strides():
    torch.manual_seed(0)
    model, inputs = Permuted(), (torch.randn(4, 6, 5), torch.randn(4, 5, 6))
    compiled = compile_with(model, inputs, mesh_of())

    compiled(*inputs).backward()
    model(*inputs).backward()

    for mine, its in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


class Normed(nn.Module):
    """A layer norm between group norms of transposed tokens: its gradient lies otherwise than fake tensors say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.tokens = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        normed = self.tokens(self.first(x.mT).mT)
        return self.last(normed.mT).mT.square().mul(torch.arange(8.0)).mean()


def test_group_norms_are_handed_memory_in_the_order_that_they_read():
    model, x = Normed(), torch.randn(4, 6, 8)
    compiled = compile_with(copy.deepcopy(model), (x,), mesh_of())

    model(x).backward()
    compiled(x).backward()

    for (name, wanted), found in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)


def test_tied_parameters_stay_tied_and_the_model_itself_is_left_alone():
    model, example = cases()["tied"]
    mine = compile_with(model, example, ALONE)

    assert mine.head.weight is mine.embed.weight
    assert mine is not model
    assert type(model) is Tied
    assert isinstance(mine, Tied)
    assert len(list(mine.parameters())) == len(list(model.parameters()))
    torch.testing.assert_close(model(**example)["loss"], mine(**example)["loss"])


def test_buffers_are_updated_in_place():
    model, example = cases()["vision"]
    mine = compile_with(copy.deepcopy(model), example, ALONE)
    held = mine.norm.running_mean
    for each in (model, mine):
        call(each, example)

    assert mine.norm.running_mean is held
    for want, got in zip(model.buffers(), mine.buffers(), strict=True):
        assert torch.equal(got, want)


class Centred(nn.Module):
    """Subtracts a running mean, which it assigns to its buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        made = self.linear(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * made.detach().mean(0)
        return (made - self.mean).square().mean()


def test_buffers_that_forward_assigns_are_updated_at_every_step():
    model, x = Centred(), torch.randn(8, 4)
    mine = compile_with(copy.deepcopy(model), (x,), ALONE)
    for _ in range(3):
        torch.testing.assert_close(mine(x), model(x))

    assert mine.mean.abs().sum() > 0
    torch.testing.assert_close(mine.mean, model.mean)


class Recurrent(nn.Module):
    """An LSTM of two layers, both ways, on the input as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.lstm(x)[0].square().mean()


def test_a_recurrent_layer_that_reads_an_input_trains():
    model, x = Recurrent(), torch.randn(8, 3, 4)
    mine = compile_with(copy.deepcopy(model), (x,), ALONE)
    for each in (model, mine):
        each(x).backward()

    for want, got in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_parameters_on_meta_without_initialisation_are_refused_by_name():
    with torch.device("meta"):
        model = Mlp()

    with pytest.raises(
        UsageError, match=r"4 parameters or buffers are on meta.*up\.weight, up\.bias, down\.weight and 1"
    ):
        compile_with(model, cases()["mlp"][1], ALONE)


def test_parameters_on_meta_are_initialised_as_on_one_device():
    example = cases()["vision"][1]
    torch.manual_seed(3)
    want = Vision()
    with torch.device("meta"):
        model = Vision()

    def init(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    torch.manual_seed(3)
    mine = compile_with(model, example, ALONE, init_fn=init)

    for (name, a), b in zip(want.state_dict().items(), mine.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_an_initialisation_that_leaves_values_unset_is_refused():
    with torch.device("meta"):
        model = Mlp()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    with pytest.raises(UsageError, match=r"up\.bias"):
        compile_with(model, cases()["mlp"][1], ALONE, init_fn=init)


def test_a_step_leaves_no_saved_tensors_behind():
    mine = compile_with(Plain(), (torch.randn(8, 8),), ALONE)
    out = mine(torch.randn(8, 8))
    out.sum().backward()
    watched = weakref.ref(out)

    del out
    gc.disable()
    try:
        assert watched() is None
    finally:
        gc.enable()


def test_dropout_draws_what_the_model_itself_draws_from_the_same_seed():
    model = Tied(dropout=0.5)
    example = cases()["tied"][1]
    mine = compile_with(copy.deepcopy(model), example, ALONE)

    torch.manual_seed(11)
    want = model(**example)["loss"]
    torch.manual_seed(11)
    got = mine(**example)["loss"]

    torch.testing.assert_close(got, want)


def test_inductor_can_run_the_programs():
    model, example = cases()["mlp"]
    mine = compile_with(copy.deepcopy(model), example, ALONE, backend=inductor_graph)
    for each in (model, mine):
        each(*example)[1].backward()

    for want, got in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
