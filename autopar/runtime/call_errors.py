"""What can be wrong with a call of a compiled model: its arguments, the modes around it, and what other ranks bring."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InputMismatchError, RanksDisagreeError, UsageError
from autopar.ir.reads import ABSENT
from autopar.runtime.backend_words import plainly
from autopar.runtime.errors import first_line, some


def input_on_meta(path: str) -> InputMismatchError:
    """Return the error for an input on meta, which has no values."""
    return InputMismatchError(
        f"argument {path} is on meta and has no values; bring it on this rank's device or on the CPU"
    )


def input_not_graded(path: str) -> InputMismatchError:
    """Return the error for an input that is to get a gradient, where the program computes none for it."""
    return InputMismatchError(
        f"argument {path} requires a gradient, and the plan was made for one that requires none: its gradient would be "
        "lost; plan with example_inputs in which it requires one (x.requires_grad_()), or pass it detached if no "
        "gradient is wanted"
    )


def other_form(differs: str) -> str:
    """Return the warning about the first training call whose tensors are of another form than planned."""
    what = first_line(differs.partition(":")[0])
    return (
        f"{what}: a program for calls of this form is made now (seconds), as for each further form, and kept. It has "
        "parameters where the plan has them, which was searched for the planned form: give example_inputs of the form "
        "that comes most often"
    )


def many_forms(count: int, *, training: bool) -> str:
    """Return the warning about calls of many shapes, each of which has its own program."""
    return (
        f"{count} programs were made by now for calls in {'training' if training else 'evaluation'}, one for each form "
        "of call (shapes of inputs, numbers among them and among attributes of modules): each is captured and planned "
        "(seconds) and kept. Pad inputs to a few shapes; where lengths grow call by call, as in generation, to the "
        "longest"
    )


def mode_differs(name: str, *, now: bool) -> InputMismatchError:
    """Return the error for a module that went from training to evaluation after planning, or back, without its model.

    `now` is whether it trains.
    """
    modes = ("evaluation", "training") if now else ("training", "evaluation")
    return InputMismatchError(
        f"module {name!r} is in {modes[1]} mode now, and was in {modes[0]} mode when the plan was made: the program "
        "does what it did then; set modes of single modules before compiling, and keep them in the model's own train()"
    )


def autocast_differs(around: str, planned: str | None) -> InputMismatchError:
    """Return the error for a call inside an autocast to another type than the program was planned for."""
    name = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(around, around)
    return InputMismatchError(
        f"an autocast to {around} is around this call, and the program was planned "
        f"{f'for {planned}' if planned else 'without one'}: its casts are part of it; plan with precision={name!r} "
        "(--precision), or call it outside of the autocast"
    )


def attribute_differs(name: str, planned: object, now: object) -> InputMismatchError:
    """Return the error for an attribute of the model that has another value than its programs were made for."""
    got = "gone" if now is ABSENT else repr(now)
    return InputMismatchError(
        f"attribute {name} is {got}, and the plan was made for {planned!r}: values of attributes are part of a "
        "program, of which each takes seconds to make. A number that changes from step to step is to be an argument of "
        "forward that is a tensor, or a buffer (self.register_buffer(...), then .fill_(...))"
    )


def forward_replaced(kind: str, failed: str) -> UsageError:
    """Return the error for a compiled model with a forward of its own that does not call the compiled one."""
    why = f" (it failed: {failed})" if failed else ""
    return UsageError(
        f"forward of this compiled {kind} was replaced after autopar.compile, and what stands there runs the model's "
        f"modules one by one on this rank's parts of the parameters, not the plan{why}. Have it replaced before "
        "autopar.compile, which captures it then, or leave out what replaces it (of trl, the fused losses: override "
        "compute_loss to return model(**inputs).loss)"
    )


def transformed(kind: str) -> UsageError:
    """Return the error for a call inside a transform of torch.func."""
    return UsageError(
        f"this compiled {kind} is called inside a transform of torch.func (grad, vmap, jvp), which cannot look into "
        "its program: call loss.backward() or torch.autograd.grad(loss, parameters) on what it returns, or transform "
        "inside of the model, before autopar.compile"
    )


def differentiated_twice(kind: str) -> UsageError:
    """Return the error for a gradient of a compiled model that is differentiated again."""
    return UsageError(
        f"a gradient of this compiled {kind} is differentiated again (create_graph=True), and its program computes "
        "first derivatives alone. Put what needs the gradient inside of the model: a forward that calls "
        "torch.autograd.grad(..., create_graph=True) itself and returns loss plus penalty is captured as a whole"
    )


def other_batches(rank: int, differs: str, count: int, *, parts: bool) -> RanksDisagreeError:
    """Return the error for ranks that bring unlike batches to a call; `rank` is the first of `count` that differ."""
    shown = f"{count} ranks bring another batch than rank 0" if count > 1 else f"rank {rank} brings another batch"
    alike = (
        "with inputs='local' each rank brings a part of the batch, and all parts have the same shapes: pad them to one "
        "length, and take drop_last=True"
        if parts
        else "every rank is to pass the same, whole batch, of which each computes its share. Leave DistributedSampler "
        "out; let all ranks draw the same order (DataLoader(..., shuffle=True, "
        "generator=torch.Generator().manual_seed(0))) and the same noise; or, where the loader splits the batch over "
        "ranks, compile with inputs='local' and take DistributedSampler's rank and num_replicas from "
        "autopar.input_part(model)"
    )
    return RanksDisagreeError(f"{shown}: rank {rank} has {differs}\n{alike}")


def waits_alone(rank: int, forms: Sequence[str], after_s: float) -> str:
    """Return the warning of a rank that has met a form of call which is new to it, while no other rank has."""
    return (
        f"rank {rank} has waited {after_s:.0f} s for the other ranks with a form of call that is new to it "
        f"({some(forms)}): where they bring other tensors they run another program by now, and all wait until the "
        "process group's timeout. Every rank is to pass the same, whole batch, with inputs='local' parts of the same "
        "shapes (pad them to one length, take drop_last=True)"
    )


def not_compared(cause: str) -> RanksDisagreeError:
    """Return the error for a rank whose call no other rank makes, so that their arguments cannot be compared."""
    return RanksDisagreeError(
        f"no other rank came to compare this call's arguments: {plainly(cause)}\none has stopped (see its own output), "
        "or makes another call: all ranks are to call the model equally often, with tensors of the same shapes"
    )
