"""Programs that many tests plan or compile, captured once a run, and the plans of those compiled, searched once.

A capture takes longer than a small model's plan, rewriting and steps together, and tests of many wishes for one
model ask for the same program again and again, each of the ranks of a test for itself. A process keeps what it has
captured and writes it where all workers of a run and their ranks read it (`tests.support.written`).
`autopar.capture.capture` itself is what it always is: its own tests, and whoever calls it, capture anew;
`remembered` does the same once a run. What `autopar.compile` asks a search for is answered alike: tests of what
compiled modules do have few plans, each many times. `autopar.plan` and `plan_captured` search anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import autopar.api
import autopar.api.compiling
from autopar._torch import pytree
from autopar.capture import Captured, capture
from autopar.ir.plan import Plan
from autopar.ir.plan_json import from_json, to_json
from autopar.options import PlanOptions
from autopar.progress import Progress
from cost_models.cluster import ClusterSpec
from tests.support.written import UNWRITABLE, read, written

T = TypeVar("T")

_MOST = 64
"""Programs that are kept; the oldest goes first."""

FOLDER = "AUTOPAR_TESTS_PROGRAMS"
"""Variable that names the folder which the processes of a run share; without it each has what it captured itself."""

_captured_for = autopar.api.captured_for
_plan_captured = autopar.api.plan_captured
_known: dict[bytes, tuple[Captured, str]] = {}


def remember_programs() -> None:
    """Let `autopar.plan` and `autopar.compile` take a program that this process has captured before."""
    autopar.api.captured_for = _remembered
    autopar.api.compiling.captured_for = _remembered
    autopar.api.compiling.plan_captured = _planned


def remembered(model: nn.Module, example_inputs: Any, *, training: bool = True, with_backward: bool = True) -> Captured:
    """Return what `autopar.capture.capture` does, which the caller only reads."""
    how = {"training": training, "with_backward": with_backward}
    return _known_or(_key(model, example_inputs, "as it is", how), lambda: capture(model, example_inputs, **how))


def _remembered(model: nn.Module, example_inputs: Any, precision: str, **how: bool) -> Captured:
    return _known_or(
        _key(model, example_inputs, precision, how), lambda: _captured_for(model, example_inputs, precision, **how)
    )


def _known_or(key: bytes | None, make: Callable[[], Captured]) -> Captured:
    """Return the program of a model whose every attribute and hook equals those of one known, or capture it.

    It is had anew if a compilation has written into it, as it may into a program of its own, and captured anew always
    for models that hold tensors outside of their parameters and buffers: these are read when the program runs.
    """
    if key is None:
        return make()
    if key in _known:
        found, code = _known[key]
        if found.joint.code == code:
            return found
    folder = os.environ.get(FOLDER)
    found = _of_all(Path(folder) / key.hex(), make, read, written) if folder else make()
    if not found.constants:
        _known[key] = found, found.joint.code
        if len(_known) > _MOST:
            del _known[next(iter(_known))]
    return found


def _planned(captured: Captured, name: str, cluster: ClusterSpec, options: PlanOptions, progress: Progress) -> Plan:
    """Return the plan that `autopar.api.plan_captured` does: equal requests have equal plans, to the byte."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return _plan_captured(captured, name, cluster, options, progress)
    asked = repr((captured.graph, captured.joint.code, name, cluster, options))

    def make() -> Plan:
        return _plan_captured(captured, name, cluster, options, progress)

    path = Path(folder) / f"plan-{hashlib.sha256(asked.encode()).hexdigest()}"
    return _of_all(path, make, lambda data: from_json(data.decode(), path.name), lambda plan: to_json(plan).encode())


def _of_all(
    path: Path, make: Callable[[], T], read: Callable[[bytes], T | None], write: Callable[[T], bytes | None]
) -> T:
    """Return what a file holds, or make it and write it there; who asks for the same in the meantime waits."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = read(path.read_bytes()) if path.exists() else None
        if found is None:
            found = make()
            data = write(found)
            if data is not None:
                path.with_suffix(".part").write_bytes(data)
                path.with_suffix(".part").rename(path)
    return found


class _Writer(pickle.Pickler):
    """Writes what is asked for, equal tensors alike wherever they lie; of `faked` ones nothing can see the values."""

    def __init__(self, to: io.BytesIO, faked: Iterable[torch.Tensor]) -> None:
        super().__init__(to)
        self._faked = {id(each) for each in faked}
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def persistent_id(self, found: Any) -> Any:
        """Return a tensor's number if it was there before, else all that a capture can see of it."""
        if not isinstance(found, torch.Tensor):
            return None
        if type(found) not in (torch.Tensor, nn.Parameter) or found.layout != torch.strided:
            raise pickle.PicklingError(f"a tensor of type {type(found).__name__}")
        if id(found) in self._tensors:
            return self._tensors[id(found)]
        self._tensors[id(found)] = len(self._tensors)
        storage = self._storages.setdefault(found.untyped_storage()._cdata, len(self._storages))
        form = (type(found), found.dtype, found.device, found.shape, found.stride(), found.storage_offset())
        told = (form, found.requires_grad, found.is_leaf, storage, vars(found))
        if found.is_meta or id(found) in self._faked:
            return told
        return *told, found.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _key(model: nn.Module, example_inputs: Any, *how: Any) -> bytes | None:
    """Return what tells programs apart; none if what is asked for cannot be written down (classes in functions).

    Values of parameters, buffers and inputs do not: while a model is captured they are fake.
    """
    if not isinstance(model, nn.Module):
        return None
    given = [each for each in pytree.tree_leaves(example_inputs) if isinstance(each, torch.Tensor)]
    faked = [*model.parameters(), *model.buffers(), *given]
    state = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    to = io.BytesIO()
    try:
        _Writer(to, faked).dump((model, example_inputs, how, state))
    except UNWRITABLE:
        return None
    return hashlib.sha256(to.getvalue()).digest()
