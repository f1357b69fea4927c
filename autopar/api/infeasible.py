"""Errors about what cannot be planned, with what would make it possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, gcd, prod

from autopar.api.pipelining import Wanted
from autopar.api.solved import Solved
from autopar.costs.held import output_bytes
from autopar.costs.liveness import local_bytes
from autopar.costs.outcome import Outcome
from autopar.errors import InfeasibleError
from autopar.figures import format_bytes
from autopar.ir.plan import Estimates
from autopar.ir.roles import is_view
from autopar.options import PlanOptions
from autopar.search.meshes import DATA, Candidate, MeshAxis
from autopar.search.trials import Trial
from cost_models.cluster import ClusterSpec

_LARGEST = 3
_MOST = 0.5
"""Share of the parameters that makes it worth saying that an axis cannot split them."""


def degrees(fixed: Mapping[str, int], forbidden: Sequence[str], devices: int) -> InfeasibleError:
    """Return the error about degrees that cannot fill the cluster."""
    product = prod(fixed.values())
    said = _said(fixed, forbidden)
    if devices % product:
        return InfeasibleError(
            f"{said}: {product} ranks do not divide the cluster's {devices} devices; choose degrees whose product "
            f"divides {devices}"
        )
    return InfeasibleError(
        f"{said}: the degrees use {product} of {devices} devices and nothing may use the remaining factor "
        f"{devices // product}; raise a degree, leave one free, or take a cluster of {product} "
        f"device{'s' if product > 1 else ''}"
    )


def nothing_to_shard_over(zero: int | None, fixed: Mapping[str, int], devices: int) -> InfeasibleError:
    """Return the error about a ZeRO stage where other degrees take all devices."""
    return InfeasibleError(
        f"--fix zero={zero} shards what ranks of dp_shard, cp or ep would hold copies of, but {_said(fixed, ())} take"
        f"{'s' if len(fixed) == 1 else ''} all {devices} devices; leave zero out, or make a degree smaller"
    )


def _said(fixed: Mapping[str, object], forbidden: Sequence[str]) -> str:
    """Return what was asked for, as on the command line."""
    return " ".join([*(f"--fix {k}={v}" for k, v in fixed.items()), *(f"--forbid {k}" for k in forbidden)])


def no_stages(wanted: Wanted, fixed: Mapping[str, int], most: int, devices: int) -> InfeasibleError:
    """Return the error about a schedule of pipeline stages where there is room for one pipeline rank only.

    `most` pipeline ranks could have stages of their own.
    """
    asked = f"--fix schedule={wanted.schedule} needs pipeline stages on 2 ranks or more"
    if most < 2:
        each = f" for {wanted.interleave} stages on each" if wanted.interleave > 1 else ""
        return InfeasibleError(
            f"{asked}, and the model has too few blocks to cut between{each}; leave the schedule out, or put the "
            "layers into a torch.nn.ModuleList"
        )
    others = " ".join(f"--fix {k}={v}" for k, v in fixed.items() if v > 1)
    left = devices // prod(fixed.values())
    return InfeasibleError(
        f"{asked}; the model has blocks for up to {most}, and no number from 2 to {most} divides {left}, the devices "
        f"{f'that {others} leave of {devices}' if others else 'of the cluster'}; leave the schedule out, or change the "
        "degrees or the cluster"
    )


def batch(fixed: Mapping[str, int], size: int, leading: Sequence[int]) -> InfeasibleError:
    """Return the error about data-parallel degrees that the batch does not divide by.

    `leading` are the sizes of dimension 0 of the inputs.
    """
    asked = {key: fixed[key] for key in DATA if fixed.get(key, 1) > 1}
    parts = prod(asked.values())
    nearest = f"{size // parts * parts} or {ceil(size / parts) * parts}" if size > parts else str(parts)
    same = leading.count(size)
    whose = "the inputs" if same == len(leading) else f"{same} of {len(leading)} inputs"
    stack = ""
    if same < len(leading):
        stack = (
            ". The batch is dimension 0: inputs with time first have to be transposed inside forward, and samples that "
            "come as a list of tensors have to be stacked into one"
        )
    return InfeasibleError(
        f"{' '.join(f'--fix {k}={v}' for k, v in asked.items())}: the batch of {size} (dimension 0 of {whose}) does "
        f"not divide into {parts} equal parts; take a batch of {nearest}, or lower degrees{stack}"
    )


def width_of_stages(width: int, devices: int, batch: int, why: str) -> InfeasibleError:
    """Return the error about stages whose `width` ranks neither the batch nor the parameters divide by."""
    depth = devices // width
    return InfeasibleError(
        f"--fix pp={depth} leaves {width} of {devices} devices to each stage, and nothing divides by {width}: neither "
        f"the batch of {batch}, for data parallelism, nor the parameters ({why}); take a batch that is a multiple of "
        f"{width}, another pp, or a cluster of another size"
    )


def straddling(fixed: Mapping[str, int], depth: int, per_node: int, devices: int) -> InfeasibleError:
    """Return the error about stages that take part of some nodes and reach into others (12 ranks, nodes of 8).

    `fixed` are the other degrees; `per_node` is what the devices of every node divide by.
    """
    inside = prod(fixed.values())
    widths = [each for each in range(1, devices + 1) if devices % each == 0 == each % inside]
    fit = [devices // each for each in widths if per_node % each == 0 or each % per_node == 0]
    other = f"pp={', '.join(map(str, sorted(fit)))}" if fit else "other degrees"
    width = devices // depth
    return InfeasibleError(
        f"--fix pp={depth} leaves {width} of {devices} devices to each stage, and nodes come in {per_node}s: a "
        "stage would have all of one node and part of another, so that links between its ranks differ; take "
        f"{other}, or nodes whose number divides by {depth}"
    )


def no_time(limit_s: float, stopped: int, candidates: int) -> InfeasibleError:
    """Return the error about a search that had no plan yet when its time was over."""
    return InfeasibleError(
        f"no plan was found within the time limit of {limit_s:g} s: {stopped} of {candidates} candidates were "
        "not solved to an end; raise --time-limit, or fix degrees (--fix tp=2, say), which makes the search smaller"
    )


def wishes(reason: str) -> InfeasibleError:
    """Return the error about wishes that leave no plan."""
    return InfeasibleError(f"no plan satisfies the constraints: {reason}")


def memory(
    least: Outcome, ranks: Sequence[MeshAxis], budget_bytes: int, cluster: ClusterSpec, options: PlanOptions
) -> InfeasibleError:
    """Return the error about a program whose smallest plan does not fit: by how much, why, and what would do.

    `ranks` are the axes of that plan's mesh.
    """
    held = least.memory()
    lines = [
        (
            f"no plan fits: even the smallest needs {format_bytes(held.total)} per device and the budget is "
            f"{format_bytes(budget_bytes)} ({format_bytes(cluster.memory_bytes)} less the margin of "
            f"{options.memory_margin:.0%})."
        ),
        "Largest tensors in that plan:",
        *(f"    {format_bytes(size):>12}  {name}" for size, name in _largest(least)),
    ]
    parts = {
        "parameters": held.parameters, "gradients": held.gradients, "optimizer state": held.optimizer,
        "activations": held.activations, "temporaries": held.temporary, "reserved": held.reserved,
    }  # fmt: skip
    lines.append("It holds " + ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size) + ".")
    lines += _undivided(least, ranks)
    lines.append("What would make it fit: " + "; ".join(_ways_out(least, budget_bytes, cluster, options)) + ".")
    return InfeasibleError("\n".join(lines))


def outputs(outcome: Outcome, estimates: Estimates) -> InfeasibleError:
    """Return the error about outputs that are to be kept over micro-batches and leave no room for the step."""
    sizes = output_bytes(outcome)
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return InfeasibleError(
        f"--keep-outputs: what the model returns beside its loss ({named} a device over {outcome.microbatches} "
        f"micro-batches) and the fastest step that fits without it need {format_bytes(estimates.peak_memory_bytes)} of "
        f"{format_bytes(estimates.memory_budget_bytes)}; leave --keep-outputs out, give --memory-margin a smaller "
        "share, or --fix recompute=full to make room"
    )


def thriftiest(failed: Sequence[Solved], held: Callable[[Trial], float]) -> list[Solved]:
    """Return, of what did not fit, the trial of each mesh that needs least, those first that are to hold least."""
    best: dict[Candidate, Solved] = {}
    for one in failed:
        known = best.get(one.trial.ranks)
        if one.trial.depth == 1 and (known is None or thrift(one) > thrift(known)):
            best[one.trial.ranks] = one
    return sorted(best.values(), key=lambda each: held(each.trial))


def thrift(one: Solved) -> tuple[bool, int]:
    """Return whether all is recomputed, and how many micro-batches there are: what needs less memory is larger."""
    return one.trial.recompute == "full", one.trial.microbatches


def _undivided(least: Outcome, ranks: Sequence[MeshAxis]) -> list[str]:
    """Return what is to be said of axes along which most parameters cannot be split, for no dimension divides.

    That is tensor parallelism: other axes pad what they keep.
    """
    metas = [(op.target, op.outputs[0]) for op in least.graph.ops if op.kind == "parameter"]
    sized = [(name, meta) for name, meta in metas if meta is not None]
    total = sum(meta.nbytes for _, meta in sized)
    found = []
    for axis in ranks:
        whole = [(name, meta) for name, meta in sized if all(size % axis.size for size in meta.shape)]
        held = sum(meta.nbytes for _, meta in whole)
        if axis.role != "tp" or held <= total * _MOST:
            continue
        name, meta = max(whole, key=lambda each: each[1].nbytes)
        divides = max(gcd(axis.size, size) for size in meta.shape)
        sizes = " x ".join(map(str, meta.shape))
        found.append(
            f"{axis.size} ranks of {axis.role} divide no dimension of {format_bytes(held)} of the parameters' "
            f"{format_bytes(total)} ({name}: {sizes}), which all of them hold whole; {divides} of them would, and the "
            f"other factor {axis.size // divides} could be pipeline stages (--fix pp={axis.size // divides})."
        )
    return found


def _largest(least: Outcome) -> list[tuple[int, str]]:
    graph, sizes = least.graph, least.links.sizes
    found: dict[str, int] = {}
    for op in graph.ops:
        for index, meta in enumerate(op.outputs):
            if meta is None or (op.kind == "call" and (not op.refs or is_view(op))):
                continue
            layout = least.strategy(graph.representative(op.name)).outputs[index]
            name = op.target if op.kind != "call" else f"{op.where}"
            found[name] = max(found.get(name, 0), round(local_bytes(meta, layout, sizes)))
    return [(size, name) for name, size in sorted(found.items(), key=lambda item: -item[1])[:_LARGEST]]


def _ways_out(least: Outcome, budget_bytes: int, cluster: ClusterSpec, options: PlanOptions) -> list[str]:
    held = least.memory()
    ways = []
    if options.fix or options.forbid:
        ways.append(f"other choices than {_said(options.fix, options.forbid)}, with which this is the smallest plan")
    if held.total <= cluster.memory_bytes and options.memory_margin > 0:
        margin = max(0.0, 1.0 - held.total / cluster.memory_bytes)
        ways.append(f"--memory-margin {margin * 100:.1f}%")
    moving = held.activations + held.temporary
    resting = held.total - moving
    batch = least.graph.batch_size
    if resting < budget_bytes and batch > 1 and moving:
        smaller = int(batch * (budget_bytes - resting) / moving)
        if 1 <= smaller < batch:
            ways.append(f"a global batch of about {smaller} instead of {batch} (--batch {smaller})")
    splittable = held.total - held.reserved
    if budget_bytes > held.reserved:
        devices = ceil(cluster.device_count * splittable / (budget_bytes - held.reserved))
        ways.append(f"about {devices} devices instead of {cluster.device_count}, if everything divides")
    ways.append(f"devices with {format_bytes(ceil(held.total / (1.0 - options.memory_margin)))} of memory")
    if options.optimizer in {"adam", "adamw"}:
        ways.append(f"an optimizer without state ({format_bytes(held.optimizer)} less: --optimizer sgd)")
    return ways
