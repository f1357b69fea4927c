"""What is captured of a model: values equal to eager's, and what each part of the program stands for."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten

from autopar._torch import FakeTensorMode
from autopar.capture import CallArguments, capture
from autopar.capture.fake import FakeModel
from autopar.capture.lazy import write_lazy_tensors
from autopar.errors import CaptureError, InputMismatchError
from tests.capture.program import run


class Net(nn.Module):
    """Tied, frozen and unused parameters, BatchNorm, a tensor attribute, a literal tensor, an in-place operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scale = torch.arange(8.0)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) * self.frozen + self.scale + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        x = self.norm(x)
        x.mul_(2)
        logits = self.head(x)
        return functional.cross_entropy(logits, ids, weight=weights)


IDS = torch.tensor([1, 5, 7, 3])


def _eager(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, nn.Module]:
    """Return what a copy of the model returns, and the copy after its backward."""
    twin = copy.deepcopy(model)
    result = twin(*args, **kwargs)
    result.backward()
    return result.detach(), twin


def test_program_equals_eager_bit_for_bit():
    torch.manual_seed(0)
    model = Net()
    loss, twin = _eager(model, IDS)

    ran = run(capture(model, {"ids": IDS}), model, (IDS,))

    torch.testing.assert_close(ran.result, loss, rtol=0, atol=0)
    trained = {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}
    assert {name for name, each in ran.gradients.items() if each is not None} == set(trained)
    for name, gradient in trained.items():
        torch.testing.assert_close(ran.gradients[name], gradient, rtol=0, atol=0)
    buffers = dict(twin.named_buffers())
    assert set(ran.mutations) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for name, value in ran.mutations.items():
        torch.testing.assert_close(value, buffers[name], rtol=0, atol=0)


def test_unused_parameter_has_a_gradient_output_without_value_and_frozen_ones_none():
    graph = capture(Net(), (IDS,)).graph
    names = {op.name: op.target for op in graph.ops}
    gradients = {names[each.name]: each.ref for each in graph.outputs if each.kind == "gradient"}

    assert gradients["unused.weight"] is None
    assert gradients["unused.bias"] is None
    assert "frozen" not in gradients


def test_tied_parameter_is_one_operator_with_every_name():
    graph = capture(Net(), (IDS,)).graph

    assert graph.aliases == {"embed.weight": ("embed.weight", "head.weight")}
    assert [op.target for op in graph.ops if op.kind == "parameter"].count("embed.weight") == 1
    assert "head.weight" not in {op.target for op in graph.ops}


def test_constants_keep_their_values():
    captured = capture(Net(), (IDS,))
    names = {op.name: op.target for op in captured.graph.ops if op.kind == "constant"}

    values = {names[name]: value for name, value in captured.constants.items()}

    assert torch.equal(values["scale"], torch.arange(8.0))
    assert any(torch.equal(value, torch.arange(1.0, 9.0)) for value in values.values())


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "refused"])
def test_model_and_random_state_are_left_as_they_were(fails: bool):
    class Counting(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            loss = super().forward(ids) + functional.dropout(self.frozen, 0.5).sum()
            return loss if not fails else loss * int(loss.item())

    model = Counting().eval()
    tensors = {name: (id(each), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    scale, state = model.scale, torch.get_rng_state()

    if fails:
        with pytest.raises(CaptureError):
            capture(model, (IDS,))
    else:
        with pytest.warns(UserWarning, match="changes the attribute calls"):
            capture(model, (IDS,))

    assert torch.equal(torch.get_rng_state(), state)
    assert model.scale is scale
    assert not model.training
    assert not hasattr(model, "calls")
    assert {name: id(each) for name, each in model.state_dict(keep_vars=True).items()} == {
        name: identity for name, (identity, _) in tensors.items()
    }
    for name, each in model.state_dict().items():
        torch.testing.assert_close(each, tensors[name][1], rtol=0, atol=0)
    assert all(each.grad is None for each in model.parameters())


def test_parameters_on_meta_give_the_same_program():
    with torch.device("meta"):
        empty = Net()

    assert capture(empty, (IDS.to("meta"),)).graph.fingerprint == capture(Net(), (IDS,)).graph.fingerprint


def test_every_operator_knows_module_source_line_and_phase():
    graph = capture(Net(), (IDS,)).graph
    calls = [op for op in graph.ops if op.kind == "call"]

    assert all(op.source.startswith("tests/capture/test_capture.py:") for op in calls)
    by_target = {op.target: op for op in calls}
    assert by_target["aten.native_batch_norm_backward.default"].module == "norm"
    assert by_target["aten.embedding.default"].module == "embed"
    assert by_target["aten.embedding_dense_backward.default"].phase == "backward"
    phases = [op.phase for op in calls]
    assert phases == sorted(phases, reverse=True)
    readers = {name: {graph.by_name[user].phase for user in users} for name, users in graph.users.items()}
    assert all("forward" not in readers[op.name] for op in calls if op.phase == "backward")


def test_module_is_known_where_a_class_looks_up_its_attributes_itself():
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    captured = capture(Configured(), (X,))

    found = {op.module for op in captured.graph.ops if op.target == "aten.addmm.default"}
    assert found == {"first", "layers.0", "layers.1"}


def test_additions_of_gradients_are_backward_and_belong_to_a_module():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return (y + self.second(y)).sum()

    graph = capture(Twice(), (torch.zeros(2, 4),)).graph

    (addition,) = (op for op in graph.ops if op.target == "aten.add.Tensor" and op.phase == "backward")
    assert addition.module == "second"


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    extra: dict[str, Any]


class Returns(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        match self.form:
            case "plain":
                return y
            case "tuple":
                return y, (y + 1, None, 3)
            case "dict":
                return {"a": y, "b": [y.sum(), "text"]}
            case "dataclass":
                return Answer(y, {"twice": y, "input": x})
            case _:
                return y.view(-1), y, y[0]


@pytest.mark.parametrize("form", ["plain", "tuple", "dict", "dataclass", "views"])
def test_return_value_is_rebuilt(form: str):
    model, x = Returns(form), torch.randn(2, 4)

    ran = run(capture(model, (x,)), model, (x,))

    expected = model(x)
    if form == "dataclass":
        assert type(ran.result) is Answer
        ran, expected = dataclasses.replace(ran, result=vars(ran.result)), vars(expected)
    found, structure = tree_flatten(ran.result)
    wanted, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=0)
        else:
            assert one == other


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        *more: torch.Tensor,
        power: int = 1,
        mask: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        y = self.linear(batch["x"]) ** power
        for each in more:
            y = y + each
        if mask is not None:
            y = y * mask
        return (y + rest.get("bias", 0)).sum()


X = torch.randn(2, 4)
CALLS = {
    "nested": (({"x": X},), {}),
    "variadic": (({"x": X}, X + 1, X + 2), {}),
    "keywords": ((), {"batch": {"x": X}, "power": 2, "mask": X > 0}),
    "default given": (({"x": X},), {"power": 1, "mask": None}),
    "extra": (({"x": X},), {"bias": 2.5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_any_call_signature_is_flattened_as_it_was_captured(name: str):
    args, kwargs = CALLS[name]
    model = Takes()

    ran = run(capture(model, CallArguments(args, kwargs)), model, args, kwargs)

    torch.testing.assert_close(ran.result, model(*args, **kwargs).detach(), rtol=0, atol=0)


def test_one_tensor_given_twice_is_two_inputs():
    class Pair(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - b

    captured = capture(Pair(), (X, X))

    ran = run(captured, Pair(), (X, X + 1))
    torch.testing.assert_close(ran.result, X - (X + 1))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"x": X},), {"power": 3}, r"argument power is 3, and the plan was made for 2; .*torch\.tensor\(3\)"),
        (({"x": X}, X), {"power": 2}, "differ in structure"),
        (({"y": X},), {"power": 2}, r"differ in structure .*: it lacks batch\.x and it has batch\.y\n"),
        (({"x": 1.0},), {"power": 2}, r"argument batch\.x is 1\.0, and the plan was made for float32\[2, 4\]"),
    ],
)
def test_other_call_is_refused(args: Any, kwargs: Any, message: str):
    captured = capture(Takes(), CallArguments(({"x": X},), {"power": 2}))

    with pytest.raises(InputMismatchError, match=message):
        captured.call.flatten(args, kwargs)


def test_input_that_requires_grad_gets_a_gradient():
    x = torch.randn(2, 4, requires_grad=True)
    model = nn.Linear(4, 4)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum()

    ran = run(capture(Sum(), (x,)), Sum(), (x,))

    torch.testing.assert_close(ran.gradients["x"], model.weight.detach().sum(0).expand(2, 4))


def test_output_computed_outside_a_loss_gets_a_tangent():
    captured = capture(nn.Linear(4, 4), (X,))

    assert [each.target for each in captured.placeholders if each.kind == "tangent"] == ["output"]


def test_without_backward_there_is_only_forward():
    captured = capture(Net(), (IDS,), with_backward=False, training=False)

    assert {op.phase for op in captured.graph.ops} == {"forward"}
    assert {each.kind for each in captured.graph.outputs} == {"output"}
    model = Net().eval()
    torch.testing.assert_close(run(captured, model, (IDS,)).result, model(IDS).detach(), rtol=0, atol=0)


def test_module_frozen_in_eval_mode_stays_so():
    model = Net().train()
    model.norm.eval()

    assert not [each for each in capture(model, (IDS,)).graph.outputs if each.kind == "mutation"]


def test_autocast_inside_the_model_is_kept_whatever_device_it_names():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.linear(x)

    graph = capture(Mixed(), (X,)).graph

    (output,) = (each for each in graph.outputs if each.kind == "output")
    assert output.ref is not None
    assert graph.meta(output.ref).dtype == "bfloat16"


def test_non_contiguous_parameter_keeps_its_strides():
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(torch.randn(4, 6).t())

    captured = capture(model, (X,))

    (node,) = (n for n in captured.joint.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (6, 4))
    assert node.meta["val"].stride() == (1, 6)


def test_attribute_that_cannot_be_copied_does_not_matter():
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.lock = threading.Lock()

    model = Locked()

    torch.testing.assert_close(run(capture(model, (X,)), model, (X,)).result, model(X).detach())


def test_batch_size_is_the_inputs_first_dimension():
    assert capture(nn.Linear(4, 4), (torch.zeros(12, 4),)).graph.batch_size == 12


def test_prints_in_forward_are_left_out():
    class Talks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("shape", x.shape)
            return super().forward(x)

    assert capture(Talks(4, 4), (X,)).graph.ops


def test_strides_that_say_nothing_leave_no_operator():
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = functional.adaptive_avg_pool1d(self.before(x).transpose(1, 2), 1).flatten(1)
            return rows.square().mean()

    model, x = Pooled(), torch.randn(4, 6, 3)

    captured = capture(model, (x,))
    found = run(captured, model, (x,))
    model(x).backward()

    assert not {op.target for op in captured.graph.ops} & {
        "aten.as_strided.default", "aten.as_strided_scatter.default", "aten.new_zeros.default", "aten.copy.default"
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_zeros_that_torch_leaves_unwritten_are_written():
    graph = fx.Graph()
    zeros = graph.call_function(torch.ops.aten._efficientzerotensor.default, ([2, 3],), {"dtype": torch.float64})
    with FakeTensorMode():
        zeros.meta["val"] = torch._efficientzerotensor([2, 3], dtype=torch.float64)
    graph.output((zeros,))
    program = fx.GraphModule({}, graph)

    changed = write_lazy_tensors(program)
    program.recompile()

    (found,) = program()
    assert changed == 1
    assert not found._is_zerotensor()
    assert not zeros.meta["val"]._is_zerotensor()
    torch.testing.assert_close(found, torch.zeros(2, 3, dtype=torch.float64))


def test_transformers_models_are_not_loaded_to_find_that_a_module_is_none_of_them(monkeypatch: pytest.MonkeyPatch):
    """Some of transformers may be there for other reasons; the class of its models takes a second to load."""
    recorders = SimpleNamespace(maybe_install_capturing_hooks=pytest.fail)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", recorders)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)

    FakeModel(nn.Linear(2, 2), FakeTensorMode(allow_non_fake_inputs=True))

    assert "transformers.modeling_utils" not in sys.modules


def test_a_tensor_written_through_its_transpose_is_viewed_as_it_lies_in_memory():
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = super().forward(x)
            heads = features.view(1, 6, 2, 4).permute(0, 2, 1, 3)
            heads /= torch.full((), 4.0).sqrt() * heads.contiguous()
            return features.view(6, 8).square().sum()

    model, x = Scaled(5, 8), torch.randn(1, 6, 5)

    found = run(capture(model, (x,)), model, (x,))
    loss = model(x)
    loss.backward()

    torch.testing.assert_close(found.result, loss)
    torch.testing.assert_close(found.gradients["weight"], model.weight.grad)


def test_a_number_that_vmap_casts_is_made_as_what_it_becomes():
    class Far(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(4)
            return (x * torch.vmap(lambda place: place * 0.5)(places)).sum()

    model, x = Far(), torch.randn(2, 4)
    captured = capture(model, (x,))

    assert not [op for op in captured.graph.ops if op.target == "aten._to_copy.default" and not op.refs]
    torch.testing.assert_close(run(captured, model, (x,)).result, model(x))


def test_no_thread_of_a_progress_bar_is_left(monkeypatch: pytest.MonkeyPatch):
    bars: Any = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(bars, "monitor", None)
    interval = bars.monitor_interval

    capture(nn.Linear(4, 4), (torch.randn(2, 4),))

    assert bars.monitor is None
    assert bars.monitor_interval == interval > 0
