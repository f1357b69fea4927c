"""`autopar verify`: a plan run on this machine's CPU ranks, beside the model on one device.

Every rank builds the model from the same seed. Rank 0 trains it as it is for a few steps and leaves what came out in a
file; then all ranks train the compiled one, and each compares what it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.api import compiling
from autopar.capture.autocasting import policy
from autopar.errors import UsageError
from autopar.figures import format_bytes
from autopar.ir.plan import Plan
from autopar.report.verification import Check
from autopar.runtime import Ranks
from autopar.runtime.comparing import distance, gradients_apart, joint_norm, relative, unequal_replicas, whole
from autopar.runtime.witness import Witness, allocated, first_difference, storage_bytes
from cost_models.cluster import ClusterSpec

STEPS = 3
"""Optimizer steps that are compared."""

LIMITS = {"fp32": {"loss": 1e-5, "gradients": 1e-4, "state": 1e-4}}
"""Largest relative differences in float32: of losses, of each gradient's norm, of all parameters and buffers after the
steps."""

_SHORT = {"loss": 2e-2, "gradients": 1e-1, "state": 2e-2}
"""The same where products are computed in 16 bits: sums in another order round otherwise."""

MEMORY = 0.1
"""Share by which ranks may hold more than planned."""

SCRAP_BYTES = 1 << 20
"""What they may hold beside: scalars, counters and messages' buffers, which plans do not count."""

_EPS = 1e-5
"""Of Adam's denominator: with 1e-8, a gradient that is zero but for rounding moves its parameter by whole steps."""

_OPTIMIZERS: Mapping[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=_EPS),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=_EPS),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


@dataclass
class Training:
    """What some training steps gave: tensors, or DTensors."""

    losses: list[Any]
    gradients: dict[str, Any]
    """Of the first step."""

    state: dict[str, Any]
    """Parameters and buffers after the last."""


def verify_on_rank(plan: Plan, model: nn.Module, inputs: Any, folder: Path) -> list[Check]:
    """Return what was found, the same on every rank; all ranks of the plan must call this with equal models.

    `folder`, which all ranks reach, is where the single device's results go.

    Raises:
        AutoparError: the plan is not of this model, or cannot run here.
    """
    ranks = Ranks.join("cpu")
    stored = folder / "single-device.pt"
    draws = False
    with ranks.together("train the model on one device"):
        if ranks.rank == 0:
            draws = _draws(model, inputs)
            alone = _train(copy.deepcopy(model), inputs, plan, plan.workload.precision)
            torch.save(vars(alone), stored)
            del alone
    draws = ranks.from_first(draws)
    witness = Witness()
    cluster = ClusterSpec.from_dict(plan.cluster)
    made = compiling.compile(model, cluster, example_inputs=inputs, plan=plan, device="cpu", backend=witness)
    found = _train(made, inputs, plan, "fp32")
    orders = ranks.gather(witness.order)
    checks = _numerics(found, stored, plan, ranks) if not draws else [_no_numerics()]
    checks.append(_replicas(found))
    checks.append(_order(orders))
    del found
    checks.append(_memory(made, inputs, plan, ranks))
    return checks


def _loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return what the model calls its loss, or else the scalars that it gives, or else the mean square of it all."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    loss = output.get("loss") if loss is None and isinstance(output, Mapping) else loss
    if loss is not None and not loss.dim():
        return loss
    tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not tensors:
        raise UsageError("the model gives nothing that requires a gradient, so there is no training step to verify")
    # Beside a scalar, what the model gives is for reading (`autopar.capture.trace`), as logits are.
    terms = [each for each in tensors if not each.dim()] or [each.float().square().mean() for each in tensors]
    return torch.stack([each.float() for each in terms]).sum()


def _draws(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model draws random numbers, as dropout does; torch's generator is left as it was."""
    losses = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for seed in (1, 2):
            torch.manual_seed(seed)
            output = copy.deepcopy(model)
            output = output(**inputs) if isinstance(inputs, dict) else output(*inputs)
            losses.append([each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor)])
    return any(not torch.equal(a, b) for a, b in zip(*losses, strict=True))


def _train(model: nn.Module, inputs: Any, plan: Plan, precision: str) -> Training:
    """Return what steps of a model give that computes as a policy has it; `fp32`: as it is."""
    named = plan.workload.optimizer
    optimizer = _OPTIMIZERS[named](model.parameters()) if named in _OPTIMIZERS else None
    losses: list[Any] = []
    gradients: dict[str, Any] = {}
    torch.manual_seed(0)
    for step in range(STEPS if optimizer is not None else 1):
        with policy(precision):
            loss = _loss(model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach().clone())
        if step == 0:
            gradients = {name: p.grad.detach().clone() for name, p in _parameters(model) if p.grad is not None}
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    state = {name: each.detach().clone() for name, each in (*_parameters(model), *model.named_buffers())}
    return Training(losses, gradients, state)


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter under each of its names: of tied ones, a rank may hold those of its stages only."""
    return list(model.named_parameters(remove_duplicate=False))


def _numerics(found: Training, stored: Path, plan: Plan, ranks: Ranks) -> list[Check]:
    """Return how losses, gradients and trained values differ from the single device's."""
    wanted = Training(**torch.load(stored, mmap=True))
    losses = [relative(whole(a).cpu(), b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    gradients = {name: each for name, each in whole(found.gradients).items() if each is not None}
    state = {name: each for name, each in whole(found.state).items() if each is not None}
    apart = gradients_apart(gradients, wanted.gradients)
    squares = {name: distance(each, wanted.state[name]) ** 2 for name, each in state.items()}
    told = ranks.gather((losses, apart, squares))
    limits = LIMITS.get(plan.workload.precision, _SHORT)
    checks = [_within("loss", max(max(each) for each, _, _ in told), limits["loss"], f"of {len(losses)} steps")]
    checks.append(_largest("gradients", [each for _, each, _ in told], wanted.gradients, limits["gradients"]))
    moved: dict[str, float] = {}
    for _, _, each in told:
        moved |= {name: max(square, moved.get(name, 0.0)) for name, square in each.items()}
    if missing := wanted.state.keys() - moved.keys():
        checks.append(Check("state", "failed", f"no rank has {_some(missing)}"))
    else:
        joint = sum(moved.values()) ** 0.5 / max(joint_norm(_floats(wanted.state)), 1e-30)
        what = f"after {len(losses)} {plan.workload.optimizer} steps, {len(moved)} parameters and buffers together"
        checks.append(_within("state", joint, limits["state"], what))
    return checks


def _floats(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in values.items() if each.is_floating_point() or each.is_complex()}


def _largest(name: str, of_ranks: list[dict[str, float]], wanted: Mapping[str, Any], limit: float) -> Check:
    apart: dict[str, float] = {}
    for each in of_ranks:
        apart |= {key: max(value, apart.get(key, 0.0)) for key, value in each.items()}
    if apart.keys() != wanted.keys():
        return Check(name, "failed", f"only one of both has {_some(apart.keys() ^ wanted.keys())}")
    if not apart:
        return Check(name, "skipped", "the model has none")
    worst = max(apart, key=lambda key: apart[key])
    return _within(name, apart[worst], limit, f"largest of {len(apart)}, {worst}")


def _within(name: str, value: float, limit: float, what: str) -> Check:
    return Check(name, "ok" if value <= limit else "failed", f"off by {value:.1e} (limit {limit:.0e}), {what}")


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _no_numerics() -> Check:
    return Check(
        "numerics", "skipped", "the model draws random numbers (dropout), which split otherwise over ranks; plan and "
        "verify it with dropout 0 to compare numbers",
    )  # fmt: skip


def _replicas(found: Training) -> Check:
    values = {f"loss {step}": each for step, each in enumerate(found.losses)}
    values |= {f"gradient of {name}": each for name, each in found.gradients.items()} | found.state
    bad = unequal_replicas(values)
    if bad:
        return Check("replicas", "failed", f"ranks that hold the same differ in some bit of {_some(bad)}")
    return Check("replicas", "ok", "ranks that hold the same are equal bit by bit")


def _order(orders: list[dict[tuple[int, ...], list[str]]]) -> Check:
    differs = first_difference(orders)
    if differs is not None:
        return Check("collective order", "failed", differs)
    groups = {members for order in orders for members in order}
    issued = sum(len(each) for each in max(orders, key=lambda order: sum(map(len, order.values()))).values())
    return Check("collective order", "ok", f"{issued} collectives a rank, {len(groups)} process groups, equal on all")


def _memory(model: nn.Module, inputs: Any, plan: Plan, ranks: Ranks) -> Check:
    """Return how much the fullest rank holds in forward and backward beside the plan's figure, its reserve left out."""
    named = plan.workload.optimizer
    optimizer = _OPTIMIZERS[named](model.parameters()) if named in _OPTIMIZERS else None

    def gradients() -> None:
        _loss(model, inputs).backward()  # type: ignore[no-untyped-call]

    gradients()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    of = optimizer.state.values() if optimizer is not None else ()
    state = [each for values in of for each in values.values() if isinstance(each, torch.Tensor)]
    held = storage_bytes([*model.parameters(), *model.buffers(), *state, *pytree.tree_leaves(inputs)])
    peak, _ = allocated(gradients)
    measured = max(ranks.gather(held + peak))
    planned = plan.estimates.peak_memory_bytes - plan.estimates.memory.reserved
    what = f"{format_bytes(measured)} measured, {format_bytes(planned)} planned beside the process itself"
    return Check("memory", "ok" if measured <= planned * (1 + MEMORY) + SCRAP_BYTES else "failed", what)
