"""The public functions, composed of the stages: capture to search here for `plan`, and on to a run in `compiling`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from autopar._torch import pytree
from autopar.api.collecting import seldom_collected
from autopar.api.planning import Planner, Program
from autopar.api.precisions import fastest
from autopar.capture import Captured, capture
from autopar.capture.autocasting import policy
from autopar.capture.deepen import LayersDifferError, deepened
from autopar.capture.scans import scans_as_operators
from autopar.errors import CaptureError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.options import OptionKeywords, PlanOptions
from autopar.progress import Progress, Silent
from cost_models.cluster import ClusterSpec
from cost_models.errors import CostModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autopar.models.shallow import Shallow

__all__ = ["plan", "plan_captured", "plan_reference", "read_cluster"]

Cluster = ClusterSpec | str | Path | Mapping[str, Any]


def plan(
    model: torch.nn.Module,
    cluster: Cluster | None = None,
    *,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    cluster_spec: Cluster | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Return the best plan found for training `model` on `cluster`, without running or allocating anything.

    `example_inputs` is the global batch, positional (tuple) or keyword (dict); the model may be on meta. Options
    are the fields of `autopar.PlanOptions`, the flags of `autopar plan` (`fix={"tp": 8}`, `precision="bf16"`, ...).

    Raises:
        AutoparError: what a user can cause, each kind its own subclass.
    """
    parsed = PlanOptions.parse(**options)
    spec = read_cluster(cluster, cluster_spec)
    told = progress or Silent()
    return plan_model(model, spec, example_inputs, parsed, told)


def plan_model(
    model: torch.nn.Module, cluster: ClusterSpec, example_inputs: Any, options: PlanOptions, progress: Progress
) -> Plan:
    """Return the best plan for a model; of precision `auto`, captured in each."""

    def planned(wanted: PlanOptions) -> Plan:
        progress.phase("capture")
        captured = captured_for(model, example_inputs, wanted.precision)
        _check_batch(captured.graph, wanted)
        return plan_captured(captured, type(model).__name__, cluster, wanted, progress)

    return fastest(planned, options)


def plan_reference(model: str, cluster: str, options: PlanOptions, progress: Progress) -> Plan:
    """Return the best plan for the model and cluster that two references name, as on the command line."""
    from autopar.models import resolve  # only references need transformers' and the zoo's modules

    spec = read_cluster(cluster)
    progress.phase("model")
    found = resolve(model, batch=options.batch, seq=options.seq, overrides=dict(options.set))
    if found.example_inputs is None:
        raise UsageError(f"{model} gives a model without example inputs; name a function that returns (model, inputs)")
    if options.seq is not None and model.startswith("zoo:") and found.tokens_per_step is None:
        raise UsageError(f"seq={options.seq} was asked for, and {model} reads no sequences; leave seq out")
    if options.seq is not None and not model.startswith(("zoo:", "hf:")):
        _check_seq(model, found.example_inputs, options.seq)

    def planned(wanted: PlanOptions) -> Plan:
        progress.phase("capture")
        graph = program_of(found.model, found.shallow, found.example_inputs, wanted.precision)
        _check_batch(graph, wanted, "give the function a parameter 'batch' that it makes them by")
        program = Program(graph, found.name, _torch_version(), found.tokens_per_step, settings=options.set)
        return plan_program(program, spec, wanted, progress)

    return fastest(planned, options)


def _check_seq(model: str, example_inputs: Any, seq: int) -> None:
    """Raise where a user's factory did not make inputs of the length that was asked for."""
    tensors = [each for each in pytree.tree_leaves(example_inputs) if isinstance(each, torch.Tensor)]
    if not any(seq in each.shape[1:] for each in tensors):
        shapes = ", ".join(str(list(each.shape)) for each in tensors) or "none"
        raise UsageError(
            f"seq={seq} was asked for, and no example input of {model} has a dimension of {seq} beside its batch "
            f"(shapes: {shapes}); give the function a parameter 'seq' that it makes them by, or leave seq out"
        )


def reprice_reference(
    plan: Plan, model: str, cluster: str, batch: int | None, seq: int | None, overrides: dict[str, str], told: Progress
) -> Plan:
    """Return a plan's decisions priced for the cluster that a reference names, as on the command line."""
    from autopar.api.repricing import repriced
    from autopar.models import resolve

    spec = read_cluster(cluster)
    told.phase("model")
    found = resolve(model, batch=batch, seq=seq, overrides=overrides)
    told.phase("capture")
    graph = program_of(found.model, found.shallow, found.example_inputs, plan.workload.precision)
    told.phase("price")
    return repriced(plan, graph, spec, _torch_version())


def program_of(model: torch.nn.Module, shallow: Iterable[Shallow], example_inputs: Any, precision: str) -> Graph:
    """Return the program of a model, if it can be by repeating layers of one that is as it is but has few of them."""
    with scans_as_operators(model):  # for what is compared without values, too
        for few in shallow:
            try:
                return deepened(captured_for(few.model, example_inputs, precision).graph, few.rows)
            except LayersDifferError:  # the modules are equal, what they compute is not
                continue
            except CaptureError:
                break
    return captured_for(model, example_inputs, precision).graph


def captured_for(model: torch.nn.Module, example_inputs: Any, precision: str, **how: bool) -> Captured:
    """Return the program of a model under a precision policy (products in its type, parameters as they are)."""
    with policy(precision):
        return capture(model, example_inputs, **how)


def plan_captured(
    captured: Captured,
    name: str,
    cluster: ClusterSpec,
    options: PlanOptions,
    progress: Progress,
    *,
    tokens_per_step: int | None = None,
) -> Plan:
    """Return the best plan for a captured program."""
    program = Program(captured.graph, name, _torch_version(), tokens_per_step, captured.joint)
    return plan_program(program, cluster, options, progress)


def plan_program(program: Program, cluster: ClusterSpec, options: PlanOptions, progress: Progress) -> Plan:
    """Return the best plan for a program."""
    with seldom_collected():
        return Planner(program, cluster, options, progress).plan()


def _torch_version() -> str:
    """Return torch's version without its build."""
    return torch.__version__.partition("+")[0]


def read_cluster(cluster: Cluster | None, cluster_spec: Cluster | None = None) -> ClusterSpec:
    """Return the cluster that a specification, path, preset or shorthand names, or a cluster file's document is.

    Raises:
        UsageError: none is given, two are, or it cannot be read.
    """
    if cluster is not None and cluster_spec is not None:
        raise UsageError("cluster and cluster_spec are one parameter under two names; give one of them")
    given = cluster if cluster is not None else cluster_spec
    if given is None:
        raise UsageError('no cluster given: pass a ClusterSpec, a YAML path or a shorthand such as "cpu:4"')
    if isinstance(given, ClusterSpec):
        return given
    anything: object = given
    if isinstance(anything, Plan):
        raise UsageError("the cluster given is a plan: pass it as plan=..., beside the cluster or without one")
    try:
        return ClusterSpec.from_dict(given) if isinstance(given, Mapping) else ClusterSpec.parse(str(given))
    except CostModelError as error:
        raise UsageError(str(error)) from None


def _check_batch(graph: Graph, options: PlanOptions, way_out: str = "") -> None:
    batch = graph.batch_size
    if options.batch is not None and batch and options.batch != batch:
        raise UsageError(
            f"the example inputs have a batch of {batch}, but batch={options.batch} was asked for; "
            f"{way_out or f'give example inputs of {options.batch} samples'}, or leave batch out"
        )
