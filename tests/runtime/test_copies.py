"""What users do with a compiled model as an object: deep copies, averages of weights, freezing, pickling."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import InputMismatchError, StalePlanError, UsageError
from tests.support.models import Layers
from tests.support.ranks import RankPool

FIXES = [{"dp_shard": 2}, {"pp": 2, "microbatch": 2}]


class Saves(Layers):
    """What transformers' models have."""

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> list[str]:
        """Return what would be saved."""
        return list(self.state_dict() if state_dict is None else state_dict)

    def resize_token_embeddings(self, count: int) -> None:
        """Take another number of tokens."""


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 6, generator=generator) for _ in range(3)]


def _compiled(model: nn.Module, fix: dict[str, Any] | None) -> nn.Module:
    if fix is None:
        return model
    return autopar.compile(copy.deepcopy(model), f"cpu:{2 if fix else 1}", example_inputs=(_batches()[0],), fix=fix)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    held = {name: each.detach() for name, each in model.named_parameters()}
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in held.items()}


def _close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(each, wanted[name], rtol=1e-4, atol=1e-6) for name, each in got.items())


def averaged(_rank: int, fix: dict[str, Any]) -> tuple[bool, bool, float]:
    """Return whether trained and averaged weights are those of one device, and the average's loss's difference."""
    torch.manual_seed(0)
    model, found = Layers(), []
    for each in (_compiled(model, None), _compiled(model, fix)):
        average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for x in _batches():
            each(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
        average.eval()
        with torch.no_grad():
            loss = average(_batches()[0]).item()
        found.append((_state(each), _state(average.module), loss))
    (trained, mean, loss), (my_trained, my_mean, my_loss) = found
    return _close(my_trained, trained), _close(my_mean, mean), my_loss / loss - 1


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_averages_of_weights_are_those_of_one_device(pool: RankPool, fix: dict[str, Any]):
    for trained, mean, loss in pool.values(averaged, fix):
        assert trained
        assert mean
        assert abs(loss) < 1e-5


def copied_and_trained(_rank: int, fix: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a copy made after a step trains as one device does, and leaves the original alone."""
    torch.manual_seed(0)
    model, found = Layers(), []
    for each in (_compiled(model, None), _compiled(model, fix)):
        each(_batches()[0])
        twin = copy.deepcopy(each)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        for x in _batches():
            twin(x).backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append((_state(twin), _state(each)))
    (twin_state, state), (my_twin_state, my_state) = found
    return _close(my_twin_state, twin_state), _close(my_state, state)


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_deep_copy_trains_by_itself(pool: RankPool, fix: dict[str, Any]):
    for twin, original in pool.values(copied_and_trained, fix):
        assert twin
        assert original


def frozen_and_unfrozen(_rank: int, fix: dict[str, Any]) -> bool:
    """Return whether training is that of one device where the first layers are frozen for a step and then not."""
    torch.manual_seed(0)
    model, found = Layers(), []
    for each in (copy.deepcopy(model), _compiled(model, fix)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, weight_decay=0.1)
        for step, x in enumerate(_batches()):
            each.layers[:2].requires_grad_(step != 1)
            each(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(_state(each))
    return _close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*frozen after planning")
@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_layers_frozen_between_steps_stay_as_they_are(pool: RankPool, fix: dict[str, Any]):
    assert all(pool.values(frozen_and_unfrozen, fix))


def test_freezing_after_planning_is_told_once():
    mine = _compiled(Layers(), {})
    mine.layers[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"2 parameters were frozen .*\(layers\.0\.weight, layers\.0\.bias\)"):
        mine(_batches()[0])

    mine(_batches()[1]).backward()  # warnings are errors here: the second step has none
    assert mine.layers[0].weight.grad is None
    assert mine.layers[1].weight.grad is not None


def test_unfreezing_what_was_frozen_is_refused_by_name():
    model = Layers()
    model.layers[0].requires_grad_(False)
    mine = _compiled(model, {})
    mine.requires_grad_(True)

    with pytest.raises(InputMismatchError, match=r"layers\.0\.weight requires a gradient now, and was frozen"):
        mine(_batches()[0])


def test_an_input_on_meta_is_refused_before_the_step():
    mine = _compiled(Layers(), {})
    with pytest.raises(InputMismatchError, match=r"argument \w+ is on meta and has no values; bring it on"):
        mine(_batches()[0].to("meta"))


def test_a_compiled_model_is_not_pickled():
    with pytest.raises(UsageError, match=r"a compiled Layers cannot be pickled.*state_dict\(\)"):
        torch.save(_compiled(Layers(), {}), io.BytesIO())


@pytest.mark.parametrize("convert", [nn.Module.half, lambda m: m.to(torch.float16)])
def test_a_compiled_model_is_not_converted(convert):
    mine = _compiled(Layers(), {})
    with pytest.raises(UsageError, match=r"a compiled Layers cannot be converted from float32 to float16.*precision="):
        convert(mine)

    assert mine.float().to("cpu") is mine
    assert all(each.dtype is torch.float32 for each in mine.parameters())


def test_a_part_converted_after_compiling_is_named_at_the_next_call():
    mine = _compiled(Layers(), {})
    expected = mine(_batches()[0])
    mine.layers[0].half()

    with pytest.raises(UsageError, match=r"layers\.0\.weight of the compiled Layers is float16 now and was float32"):
        mine(_batches()[0])
    mine.layers[0].float()
    torch.testing.assert_close(mine(_batches()[0]), expected, atol=1e-3, rtol=1e-3)  # it went through float16


def test_a_compiled_model_inside_of_torch_compile_runs_as_it_is():
    mine = _compiled(Layers(), {})
    expected = mine(_batches()[0])
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> Any:
        seen.extend(node.name for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
        seen.extend(node.name for node in gm.graph.nodes if "mm" in node.name or "linear" in node.name)
        return gm.forward

    torch.testing.assert_close(torch.compile(mine, backend=backend)(_batches()[0]), expected)
    assert seen == []


@pytest.mark.parametrize("where", ["torch.nn.parallel.distributed", "torch.distributed.fsdp._fully_shard._fsdp_init"])
def test_a_compiled_model_is_not_wrapped_again(where: str):
    wrapper: dict[str, Any] = {"__name__": where}
    exec("def parameters_of(model): return list(model.parameters())", wrapper)

    with pytest.raises(UsageError, match="a compiled Layers is given to DistributedDataParallel or FSDP"):
        wrapper["parameters_of"](_compiled(Layers(), {}))


@pytest.mark.parametrize("example", [(torch.zeros(4, 6),), None])
def test_accelerate_leaves_a_compiled_model_unwrapped(example: tuple[torch.Tensor, ...] | None):
    """`Accelerator.prepare`, and so transformers' Trainer, returns models that have this attribute as they are."""
    assert autopar.compile(Layers(), "cpu:1", example_inputs=example)._is_accelerate_prepared is True


def test_a_module_replaced_after_compiling_is_named():
    mine = _compiled(Layers(), {})
    mine(_batches()[0])
    old = mine.layers[1]
    mine.layers[1] = nn.Sequential(old, nn.Identity())  # the old one lives on inside, as adapters have it

    with pytest.raises(StalePlanError, match=r"module 'layers' has another '1' than when it was compiled"):
        mine(_batches()[0])
    mine.layers[1] = old
    mine(_batches()[0])


def test_a_hook_inside_that_no_program_calls_is_told():
    model = Layers()
    model.layers[0].register_forward_hook(lambda *_: None)
    mine = _compiled(model, {})
    mine.register_forward_hook(lambda *_: None)
    mine(_batches()[0])  # what was there before acts, and so do hooks of the model itself
    mine = _compiled(model, {})
    mine.layers[2].register_full_backward_hook(lambda *_: None)

    with pytest.warns(UserWarning, match=r"1 modules inside the compiled model have hooks .* \(layers\.2\)"):
        mine(_batches()[0])


def test_a_compiled_model_is_not_compiled_again():
    mine = _compiled(Layers(), {})

    with pytest.raises(UsageError, match="Sequential is compiled already, or has a part that is"):
        autopar.compile(nn.Sequential(mine), "cpu:1", example_inputs=(_batches()[0],))


def saved(rank: int, fix: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the error for saving without a state, and what is saved with the full one on rank 0."""
    mine: Any = _compiled(Saves(), fix)
    with pytest.raises(UsageError) as caught:
        mine.save_pretrained("folder")
    state = autopar.full_state_dict(mine)
    return str(caught.value), mine.save_pretrained("folder", state_dict=state) if rank == 0 else []


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_models_own_way_of_saving_gets_the_full_state(pool: RankPool, fix: dict[str, Any]):
    for rank, (refused, names) in enumerate(pool.values(saved, fix)):
        assert "save_pretrained of a compiled Saves would save what this rank holds" in refused
        assert names == ([] if rank else list(Layers().state_dict()))


def test_on_one_rank_a_models_own_way_of_saving_is_its_own():
    mine: Any = _compiled(Saves(), {})

    assert mine.save_pretrained("folder") == list(Layers().state_dict())


def test_a_compiled_model_takes_no_other_number_of_tokens():
    mine: Any = _compiled(Saves(), {})

    with pytest.raises(UsageError, match=r"resize_token_embeddings of a compiled Saves .* before autopar\.compile"):
        mine.resize_token_embeddings(8)
