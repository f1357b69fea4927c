"""What can be wrong with an optimizer of a compiled model, or with its state."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autopar.errors import UsageError
from autopar.runtime.errors import SHOWN, first_line, some


def optimizer_of_others(kind: str, shapes: Sequence[tuple[int, ...]]) -> UsageError:
    """Return the error for an optimizer that has parameters which are not the compiled model's."""
    shown = ", ".join(str(list(each)) for each in shapes[:SHOWN])
    return UsageError(
        f"{kind} has {len(shapes)} parameters that are not the compiled model's (shapes {shown}): make it of the "
        "parameters of what autopar.compile returned, and one optimizer a model"
    )


def nothing_trained_here(rank: int) -> str:
    """Return the warning about a rank of a pipeline whose stages hold nothing that is trained."""
    return (
        f"the pipeline stages of rank {rank} have no parameter that requires a gradient: an optimizer of those that do "
        "has an empty list there, at which torch raises. Make it of all of model.parameters(), or of a group, which "
        'may be empty: AdamW([{"params": [p for p in model.parameters() if p.requires_grad]}])'
    )


def optimizer_made_before(kind: str, name: str, replaced: int, count: int) -> UsageError:
    """Return the error for an optimizer of parameters in whose places a compiled model has others."""
    return UsageError(
        f"{replaced} of the {count} parameters of this {kind} are not the model's any more ({name} is one): "
        "autopar.compile put this rank's part in their places, and steps would change nothing. Make the optimizer "
        "after autopar.compile, of the parameters of what it returned"
    )


def optimizer_state_groups(saved: Sequence[int], here: Sequence[int]) -> UsageError:
    """Return the error for an optimizer state of other parameter groups; the numbers are of their parameters."""
    return UsageError(
        f"the optimizer state has parameter groups of {', '.join(map(str, saved)) or 'no'} parameters, and the "
        f"optimizer, over all ranks, has {', '.join(map(str, here)) or 'no'}: make its groups as those of the "
        "optimizer that saved the state, on all ranks in one order (with stages, an empty group where a rank has none)"
    )


def optimizer_state_is_none(given: Mapping[str, object]) -> UsageError:
    """Return the error for what is no optimizer's `state_dict()`, such as the empty one of all ranks but the first."""
    has = f"has the keys {some([str(each) for each in given])}" if given else "is empty"
    return UsageError(
        f"the optimizer state {has}, and needs state and param_groups: full_optimizer_state_dict gives it to rank 0 "
        "alone; save it there, and load the file on all ranks"
    )


def optimizer_groups_unlike(counts: Sequence[int]) -> UsageError:
    """Return the error for an optimizer that has another number of parameter groups on each rank."""
    return UsageError(
        f"the optimizer has {', '.join(map(str, counts))} parameter groups on ranks 0, 1, ...: make the same groups in "
        "the same order on all ranks, an empty one where a rank's pipeline stages have no such parameters"
    )


def optimizer_state_names(group: int, names: Sequence[str]) -> UsageError:
    """Return the error for an optimizer state of other parameters; `names` are only on one side."""
    return UsageError(
        f"group {group} of the optimizer state has other parameters (param_names) than the optimizer's: "
        f"{some(names)} {'is' if len(names) == 1 else 'are'} in one of them only; make the groups alike"
    )


def optimizer_group_order(names: Sequence[str]) -> UsageError:
    """Return the error for a group of parameters that is not in the model's order, where ranks have stages."""
    return UsageError(
        f"a parameter group is not in the order of model.named_parameters() ({some(names)}), and with pipeline stages "
        "no rank knows where the others' parameters stand in it; make groups in that order"
    )


def optimizer_state_not_flat() -> UsageError:
    """Return the error for an optimizer's state in a form in which ranks of a pipeline overwrite one another's."""
    return UsageError(
        "of an optimizer's parameter groups each rank of a pipeline has its own stages' parameters, and saved as lists "
        "they would be one rank's for all; give get_state_dict and set_state_dict "
        "options=StateDictOptions(flatten_optimizer_state_dict=True), or use autopar.full_optimizer_state_dict"
    )


def optimizer_joins_parameters(kind: str) -> UsageError:
    """Return the error for an optimizer that needs all parameters at once, where a rank holds some stages' only."""
    return UsageError(
        f"{kind} updates each parameter by what it knows of the others (tried on small tensors), and of this plan's "
        "pipeline stages each rank holds its own: ranks would take unlike steps. Use an optimizer that updates "
        "parameter by parameter (AdamW, SGD), or plan without stages (--fix pp=1)"
    )


def optimizer_fails(kind: str, error: Exception) -> UsageError:
    """Return the error for an optimizer that does not work on DTensors; `error` is what it raised."""
    said = first_line(str(error)) if str(error) else "it mixes plain tensors of its own with DTensors, most likely"
    return UsageError(
        f"{kind} fails on parameters that are DTensors (tried on small ones): {type(error).__name__}: {said}\n"
        f"{_line_of_optimizer(error)}"
        "leave out its settings fused and foreach if you gave them, use another optimizer (AdamW, SGD), or a plan "
        "whose stages have one rank each (--fix pp=RANKS), which hold plain tensors"
    )


def _line_of_optimizer(error: Exception) -> str:
    """Return where an optimizer failed: the innermost line that is not torch's, as a line of text; else nothing."""
    library = str(Path(torch.__file__).parent)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(library)]
    if not frames or frames[-1].filename.startswith(str(Path(__file__).parent)):
        return ""
    at = frames[-1]
    return f"  at {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno}: {(at.line or '').strip()}\n"


def optimizer_differs(kind: str, name: str, layout: str) -> UsageError:
    """Return the error for an optimizer that updates a parameter held in parts otherwise than a whole one."""
    return UsageError(
        f"{kind} updates a parameter held as {layout} (such as {name}) otherwise than a whole one (tried on small "
        "tensors): it works on this rank's part alone. Use an optimizer that works on DTensors (those of torch.optim "
        "do), or hold parameters whole (--fix zero=0 with dp_replicate)"
    )
