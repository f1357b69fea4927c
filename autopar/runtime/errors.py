"""What can go wrong when a plan meets the ranks, the model's values or a call."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import (
    AutoparError,
    CaptureError,
    InfeasibleError,
    InputMismatchError,
    RanksDisagreeError,
    StalePlanError,
    UsageError,
)
from autopar.ir.tensor import TensorMeta
from autopar.runtime.backend_words import plainly

SHOWN = 3


class PeerLostError(AutoparError):
    """Another rank of the pipeline stopped in the middle of a step; this one stops too."""

    exit_code = 5


class CollectiveError(AutoparError):
    """A collective failed, or waited too long for a rank; this rank stops."""

    exit_code = 5


def collective_failed(name: str, rank: int, why: str, others: Sequence[int] = ()) -> CollectiveError:
    """Return the error for a collective that the backend gave up; `others` are the ranks it is done with."""
    beside = f" with {'' if len(others) == 1 else 'one of '}{_ranks(len(others))} {_list(others)}" if others else ""
    return CollectiveError(
        f"rank {rank}: the collective {name!r}{beside} failed: {plainly(why)}\n"
        "a rank of its group stopped, or came too late; every rank that waits for it stops too. Look at the rank that "
        "failed first; if all are alive and merely slow, give init_process_group a longer timeout"
    )


def operation_missing(name: str, backend: str, why: str) -> CollectiveError:
    """Return the error for a collective that the backend does not have."""
    operation = name.partition(" ")[0]
    return CollectiveError(
        f"the backend {backend!r} has no {operation}, which the collective {name!r} needs: {first_line(why)}\n"
        "use nccl for GPUs and gloo for CPUs (both have all that plans use): leave the process group to autopar, or "
        'call init_process_group("cpu:gloo,cuda:nccl")'
    )


def no_number(variable: str, text: str) -> UsageError:
    """Return the error for a variable of torchrun's environment that is no number."""
    return UsageError(f"the environment variable {variable} is {text!r}, and must be a whole number; {_LAUNCH}")


def no_such_rank(rank: int, world_size: int) -> UsageError:
    """Return the error for a rank that is none of the job's."""
    return UsageError(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are numbered from 0; {_LAUNCH}")


def no_rendezvous(world_size: int, missing: Sequence[str]) -> UsageError:
    """Return the error for several ranks that are not told where to meet."""
    return UsageError(f"WORLD_SIZE is {world_size}, and {' and '.join(missing)} not set: ranks cannot meet; {_LAUNCH}")


def no_such_device(device: str, count: int) -> UsageError:
    """Return the error for a device that this process does not have."""
    return UsageError(
        f"this rank is to run on {device}, and torch sees {count} such devices here; run on the machines that the "
        "cluster describes, with as many ranks a node as it has devices, or give a cluster of CPU ranks such as cpu:2. "
        "For a plan alone, which needs none of them, use autopar.plan"
    )


def not_saved(kind: str) -> UsageError:
    """Return the error for saving what a rank has of a compiled model as if it were all."""
    return UsageError(
        f"save_pretrained of a compiled {kind} would save what this rank holds of it; on all ranks call "
        "state = autopar.full_state_dict(model), then on rank 0 model.save_pretrained(folder, state_dict=state)"
    )


def own_state_pickled(what: str, how: str = "pickled") -> str:
    """Return the warning about a state dict of one rank that is pickled, as `torch.save` does, or written otherwise."""
    return (
        f"the {what} is {how}: it is what this rank holds, parts of tensors or some stages' only, and no single "
        "device loads it. On all ranks call autopar.full_state_dict(model) and "
        "autopar.full_optimizer_state_dict(model, optimizer), and save on rank 0 what they return; or use "
        "torch.distributed.checkpoint. Written by each rank to a file of its own, it is loaded under the same plan only"
    )


def part_of_other_rank(name: str, saved: object, here: object) -> UsageError:
    """Return the error for a loaded DTensor of which another rank saved its own part."""
    return UsageError(
        f"{name} in the state dict is the part of it that the rank at {saved} of the mesh saved, and this rank is at "
        f"{here}: its own part is not in the file. Save what autopar.full_state_dict(model) and "
        "autopar.full_optimizer_state_dict(model, optimizer) return on rank 0, or use torch.distributed.checkpoint"
    )


def parameter_elsewhere(name: str, ranks: Sequence[int]) -> UsageError:
    """Return the error for a parameter or buffer of another pipeline stage that is read or written on this rank."""
    return UsageError(
        f"{name} is of a pipeline stage that this rank does not have"
        f"{f' (it is on {_ranks(len(ranks))} {_list(ranks)})' if ranks else ''}. To initialise it, call "
        "model.apply(function) on all ranks, or initialise before autopar.compile; to read it, call "
        "autopar.full_state_dict(model) on all ranks; a loop over model.parameters() meets what this rank has"
    )


def apply_changes_shape(name: str, before: tuple[int, ...], after: tuple[int, ...]) -> UsageError:
    """Return the error for a function given to `apply` that replaces a tensor by one of another shape."""
    return UsageError(
        f"the function given to apply changes {name} from {list(before)} to {list(after)}, and the compiled program is "
        "for the former; change the model before autopar.compile"
    )


def not_resized(kind: str, name: str) -> UsageError:
    """Return the error for a method of a compiled model that would give it other parameters."""
    return UsageError(
        f"{name} of a compiled {kind} would change parameters that its program has; call it on the model before "
        f"autopar.compile (values trained since are those of autopar.full_state_dict)"
    )


def world_size_differs(planned: int, running: int, mesh: str) -> StalePlanError:
    """Return the error for a plan made for another number of ranks."""
    return StalePlanError(
        f"the plan is for {planned} {_ranks(planned)} ({mesh or 'no mesh'}) and {running} {_are(running)} running; "
        f"start it with torchrun --nproc-per-node or --nnodes so that {planned} run, or plan again for {running}"
    )


def ranks_disagree(what: str, by_rank: Sequence[str]) -> RanksDisagreeError:
    """Return the error for ranks that hold different programs or plans; `by_rank` is what each holds."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(by_rank):
        groups.setdefault(text, []).append(rank)
    lines = [f"    ranks {_list(ranks)}: {text[:16]}" for text, ranks in groups.items()]
    return RanksDisagreeError(
        f"ranks disagree about the {what}: {len(groups)} different ones among {len(by_rank)} ranks\n"
        + "\n".join(lines)
        + "\nall ranks have stopped; give every rank the same model, example inputs, options and torch"
    )


def rank_failed(failures: Sequence[tuple[int, str]], doing: str) -> RanksDisagreeError:
    """Return the error that the other ranks raise when some could not go on."""
    first_lines = [(rank, text.splitlines()[0] if text else "no message") for rank, text in failures[:SHOWN]]
    shown = "\n".join(f"    rank {rank}: {line}" for rank, line in first_lines)
    return RanksDisagreeError(
        f"{len(failures)} other {_ranks(len(failures))} failed to {doing}; this rank stops too\n{shown}"
    )


def uninitialised(names: Sequence[str]) -> UsageError:
    """Return the error for parameters and buffers that have no values."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return UsageError(
        f"{len(names)} parameters or buffers are on meta and have no values: {', '.join(names[:SHOWN])}{more}\n"
        "pass init_fn=FUNCTION, which is called with each module that owns such tensors once they are allocated, "
        "or build the model with real values"
    )


def constant_on_meta(names: Sequence[str]) -> CaptureError:
    """Return the error for tensors that the program needs and the model has no value of."""
    return CaptureError(
        f"the model keeps {len(names)} tensors on meta as plain attributes, which have no values: "
        f"{', '.join(names[:SHOWN])}\n"
        "register them as buffers, or build the model with real values"
    )


def gradient_not_planned(output: str) -> InputMismatchError:
    """Return the error for a gradient into an output that the model returns beside its loss."""
    return InputMismatchError(
        f"a gradient arrived at the model's output {output!r}, which is planned for reading only because the "
        "model returns a loss; compute that term inside the model's forward and add it to the loss it returns, or call "
        f"{output}.detach() if no gradient is wanted"
    )


def input_differs(path: str, wanted: TensorMeta, local: tuple[int, ...], got: TensorMeta) -> InputMismatchError:
    """Return the error for an input of another shape or dtype than planned; `local` is what one rank is to bring."""
    whole = f" (this rank's part of {wanted})" if local != wanted.shape else ""
    return InputMismatchError(
        f"argument {path} is {got}, and the plan was made for {TensorMeta(local, wanted.dtype)}{whole}\n"
        f"{_bring(local, wanted, got)}, or plan again with example_inputs of this form"
    )


def _bring(local: tuple[int, ...], wanted: TensorMeta, got: TensorMeta) -> str:
    """Return what to do about such an input, as the beginning of a sentence."""
    if got.shape == local:
        return f"bring it as {wanted.dtype} (.to(torch.{wanted.dtype}))"
    smaller = bool(local and got.shape) and got.shape[1:] == local[1:] and got.shape[0] < local[0]
    last = " (drop_last=True, for a last batch that is smaller)" if smaller else ""
    return f"bring inputs of the planned shapes{last}"


def dtype_not_changed(kind: str, planned: str, asked: str) -> UsageError:
    """Return the error for a compiled model whose parameters are to get another dtype, as `.half()` does."""
    return UsageError(
        f"a compiled {kind} cannot be converted from {planned} to {asked}: its programs compute with {planned} "
        "parameters. Convert the model before autopar.compile, or choose the precision of the computation there "
        "(precision='bf16')"
    )


def dtype_changed(kind: str, name: str, planned: str, now: str) -> UsageError:
    """Return the error for a parameter or buffer that has another dtype since the model was compiled."""
    return UsageError(
        f"{name} of the compiled {kind} is {now} now and was {planned} when it was compiled: its programs compute with "
        f"{planned}. Convert it back (.to(torch.{planned})) and, if it is to be {now}, convert it before "
        "autopar.compile; or choose the precision of the computation there (precision='bf16')"
    )


def wrapped_again(kind: str) -> UsageError:
    """Return the error for a compiled model that is given to another wrapper for many ranks."""
    return UsageError(
        f"a compiled {kind} is given to DistributedDataParallel or FSDP: its programs split the batch already, and sum "
        "gradients over ranks. Leave that wrapper out; where a trainer adds it, let that take each process for the "
        "only one (Lightning: Trainer(devices=1))"
    )


def compiled_not_pickled(kind: str) -> UsageError:
    """Return the error for a compiled model that is to be pickled, as `torch.save` of a whole model does."""
    return UsageError(
        f"a compiled {kind} cannot be pickled: its programs belong to this process and its ranks. Save its "
        "state_dict() instead: with torch.distributed.checkpoint, or on one rank what autopar.full_state_dict(model) "
        "returns, called on all ranks"
    )


def sum_not_scalar(name: str, shape: tuple[int, ...]) -> UsageError:
    """Return the error for a term of a sum over parameters that is several numbers."""
    return UsageError(
        f"the function gave {list(shape)} numbers for {name}, and sum_over_parameters adds up one for each parameter; "
        "reduce it there, as p.grad.square().sum() does"
    )


def number_of_part(placements: str) -> UsageError:
    """Return the error for a number read of a DTensor that no rank holds whole."""
    return UsageError(
        f"a number is read of a DTensor held as {placements}: this rank has its own part or term of it, not the whole. "
        "Call full_tensor() on it first, on all ranks, or compile with outputs='whole', which returns plain tensors; "
        "functions that initialise parameters get them whole by model.apply(function)"
    )


def data_of_other_form(held: str, given: str) -> UsageError:
    """Return the error for `.data` assigned with another shape or type."""
    return UsageError(f"a tensor of {held} is assigned .data of {given}: convert that, or compile what is changed")


def message_lost(peer: int, stage: int, value: str, action: str, cause: str, *, sending: bool) -> PeerLostError:
    """Return the error for a tensor that did not get from or to another rank of the pipeline."""
    what = f"take {value!r}, made in the {action}" if sending else f"send {value!r}, needed for the {action}"
    return PeerLostError(f"rank {peer} (stage {stage}) did not {what}: {plainly(cause)}\n{_LOST}")


def group_lost(doing: str, peers: Sequence[int], cause: str) -> PeerLostError:
    """Return the error for a collective along the pipeline that failed."""
    return PeerLostError(f"one of ranks {_list(peers)} did not take part in the {doing}: {plainly(cause)}\n{_LOST}")


def own_failure(rank: int, stages: Sequence[int], action: str | None, cause: str) -> str:
    """Return what the other ranks are told of an error in a rank's own program."""
    which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {_list(stages)}"
    where = f" in the {action}" if action else ""
    return f"rank {rank} ({which}) failed{where}: {first_line(cause)}"


def peer_failed(lost: str, note: str) -> PeerLostError:
    """Return the error for a step that another rank's failure stopped; `note` is what that rank told."""
    return PeerLostError(f"{note}\nthis rank stops too: {lost}")


def pipeline_stopped(first: str) -> PeerLostError:
    """Return the error for a step after one that failed."""
    return PeerLostError(
        f"an earlier step of this pipeline failed, its ranks are not at the same point any more: {first_line(first)}\n"
        "start all ranks again from the last checkpoint"
    )


def batch_not_divisible(path: str, rows: int, microbatches: int) -> UsageError:
    """Return the error for an input that does not make equal micro-batches."""
    return UsageError(
        f"argument {path} has {rows} rows, which do not make {microbatches} equal micro-batches; "
        f"use a batch size that is a multiple of {microbatches}, or plan again with another --fix microbatch=N"
    )


def no_single_loss(found: Sequence[str]) -> UsageError:
    """Return the error for a model whose gradients do not all come from one scalar it returns."""
    given = f"gradients start at {', '.join(found)}" if found else "no gradient starts at its outputs"
    return UsageError(
        f"several micro-batches need a model that returns its loss, one scalar, because their backward runs inside "
        f"forward; {given}. Compute the loss inside forward, or plan with --fix microbatch=BATCH and --fix pp=1"
    )


def same_places_of_stages(count: int, names: Sequence[Sequence[str]]) -> UsageError:
    """Return the error for a norm over what looks like the same places in the lists that ranks of a pipeline have."""
    given = "; ".join(dict.fromkeys(", ".join(each) for each in names))
    return UsageError(
        f"a norm of {count} gradients of each rank was asked for ({given}). A rank lists the parameters of its own "
        "pipeline stages alone, so that a place in the list is another parameter on each: choose by name, and call "
        "autopar.clip_grad_norm_(model, max_norm, parameters=THESE) on all ranks. One parameter after another is "
        "clipped by clip_grad_norm_(parameter, max_norm), without a list around it"
    )


def generators_drifted() -> RanksDisagreeError:
    """Return the error for ranks whose random generators were equal at first and are not any more."""
    return RanksDisagreeError(
        "the ranks' random generators have drifted apart since the first step, so dropout would differ between "
        "replicas; all ranks have stopped. Draw rank-dependent random numbers (data order, augmentation) from a "
        "torch.Generator of their own"
    )


def unfrozen(name: str) -> InputMismatchError:
    """Return the error for a parameter that was frozen when the plan was made and is to be trained."""
    return InputMismatchError(
        f"parameter {name} requires a gradient now, and was frozen when the plan was made: the program computes "
        "none for it. Compile the model while everything that is ever trained requires a gradient, and freeze "
        "parameters of the compiled model afterwards: these may be frozen and unfrozen between steps"
    )


def frozen_since(names: Sequence[str]) -> str:
    """Return the warning about parameters that were frozen after planning."""
    return (
        f"{len(names)} parameters were frozen after planning ({some(names)}): they are not trained, and their "
        "gradients are computed all the same; to save that, compile a model in which they are frozen"
    )


def compiled_already(kind: str) -> UsageError:
    """Return the error for a compiled model, or one with a compiled part, that is to be compiled."""
    return UsageError(
        f"{kind} is compiled already, or has a part that is: compile the model that was given to autopar.compile "
        "before (it keeps its own parameters), or a new one, and load what was trained by load_state_dict of "
        "autopar.full_state_dict(compiled)"
    )


def module_replaced(name: str, child: str) -> StalePlanError:
    """Return the error for a module that has other children than when it was compiled."""
    where = f"module {name!r}" if name else "the model"
    return StalePlanError(
        f"{where} has another {child!r} than when it was compiled (replaced, added, removed or parametrized): the "
        "program would go on without it; change the model first and compile it then"
    )


def hooks_not_called(names: Sequence[str]) -> str:
    """Return the warning about hooks of modules inside a compiled model."""
    return (
        f"{len(names)} modules inside the compiled model have hooks that were registered after it was compiled "
        f"({some(names)}): the program does not call these modules, so the hooks never act; register them before"
    )


def partner_elsewhere(name: str, other: str) -> str:
    """Return the warning about a frozen parameter that a loop writes, whose partner another pipeline stage has."""
    return (
        f"{name} was written between steps, and {other} is on another pipeline stage: parameters() of a rank are those "
        "of its own stages, so that pairs made by their order (zip(student.parameters(), teacher.parameters())) are of "
        "others. Leave pp out (--fix pp=1) where a loop updates one branch of the model by another"
    )


def parameters_differ(missing: Sequence[str]) -> StalePlanError:
    """Return the error for a plan whose parameters the model does not have."""
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return StalePlanError(
        f"the plan says nothing about {len(missing)} parameters of the model: "
        f"{', '.join(missing[:SHOWN])}{more}; plan again"
    )


def layout_not_dtensor(name: str, layout: str) -> UsageError:
    """Return the error for a layout at rest that torch's DTensor cannot express."""
    return UsageError(
        f"{name} is to be held as {layout}, which DTensor cannot express: of the axes that split one dimension "
        "the earlier ones must split it further out; change the --constraint that asks for it"
    )


def not_compiled(name: str) -> UsageError:
    """Return the error for a question that only a compiled, planned model can answer."""
    return UsageError(
        f"{name} is no compiled model, or has no plan yet: pass what autopar.compile returned, and give that "
        "example_inputs so that it plans at once"
    )


_LAUNCH = "start the script with torchrun --nproc-per-node N, or without these variables for one rank"

_LOST = (
    "it has stopped, or is slower than the process group's timeout: see its own output. A longer timeout is given to "
    "torch.distributed.init_process_group(timeout=...)"
)


def some(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def first_line(text: str) -> str:
    """Return what a message of several lines begins with."""
    return text.splitlines()[0].rstrip(".") if text else "no message"


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)})"


def state_elsewhere(names: Sequence[str]) -> InfeasibleError:
    """Return the error about a program with gradients whose stages need what others have in training."""
    shown = ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])
    return InfeasibleError(
        f"this call computes with {shown} on another pipeline rank than training does, where it can have no gradient; "
        "call the model under torch.no_grad(), to which such parameters are lent, or let training and evaluation go "
        "through the same modules in the same order"
    )
