"""What rows of training steps leave out, or say by other columns: nodes, batches, sizes; and what is assumed then."""

import re

from cost_models.cells import Cells, count_of, said
from cost_models.errors import CostModelError

_NODE = 8
"""Devices of a node where a row does not say: most machines have so many."""

_ADAMS = re.compile(r"(fused|torch|apex|flash)?_?adamw?(_?(fused|torch|mini))*")
_ADAPTERS = re.compile(r"\bq?lora\b|\bpeft\b|\bdora\b")


def year_of(row: Cells) -> int:
    """Return when a row was measured: its `year`, else that in its `date`."""
    dated = re.search(r"\b(20\d\d)\b", row.get("date") or "")
    if not said(row, "year") and dated is not None:
        return int(dated[1])
    if not said(row, "year"):
        raise CostModelError("year is missing: when it was measured, for software is priced as it was then")
    return count_of(row, "year")


def per_node_of(row: Cells) -> tuple[int, str]:
    """Return the devices of a node, and what was assumed of them; empty: nothing."""
    if said(row, "gpus_per_node"):
        return count_of(row, "gpus_per_node"), ""
    found = min(count_of(row, "gpus"), _NODE)
    return found, f"gpus_per_node is missing: {found}"


def batches_of(row: Cells, replicas: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch and of a step; one may follow from `gradient_accumulation`.

    Raises `CostModelError` where a row says too little, or what contradicts itself.
    """
    count = count_of(row, "gradient_accumulation") if said(row, "gradient_accumulation") else 0
    micro = count_of(row, "micro_batch") if said(row, "micro_batch") else 0
    whole = count_of(row, "global_batch") if said(row, "global_batch") else 0
    if not count and not (micro and whole):
        missing = "global_batch" if micro else "micro_batch"
        raise CostModelError(
            f"{missing} is missing: two of micro_batch, global_batch and gradient_accumulation (micro-batches a step)"
        )
    if not micro and whole % (replicas * count):
        raise CostModelError(
            f"a batch of {whole} does not divide into {count} micro-batches a step (gradient_accumulation) on"
            f" {replicas} data-parallel ranks"
        )
    micro = micro or whole // (replicas * count)
    whole = whole or micro * replicas * count
    if count and micro * replicas * count != whole:
        raise CostModelError(
            f"global_batch is {whole}, and {count} micro-batches (gradient_accumulation) of {micro} on {replicas}"
            f" data-parallel ranks are {micro * replicas * count}"
        )
    return micro, whole


def ffn_of(row: Cells, family: str) -> tuple[int, str]:
    """Return the width of the feed-forward, and what was assumed: in the GPT family four times the hidden size."""
    if said(row, "ffn_hidden") or family != "gpt":
        return count_of(row, "ffn_hidden"), ""
    found = 4 * count_of(row, "hidden")
    return found, f"ffn_hidden is missing: four times hidden, {found}"


def optimizer_of(row: Cells) -> str:
    """Return what was assumed of the optimizer; empty: nothing, or it is the one that is priced."""
    text = said(row, "optimizer")
    is_priced = not text or _ADAMS.fullmatch(re.sub(r"[ -]", "_", text.lower())) is not None
    return "" if is_priced else f"optimizer {text!r} is priced as AdamW"


def refuse_adapters(row: Cells) -> None:
    """Raise for rows that trained adapters beside a frozen model: their columns describe all of its parameters."""
    for column in ("framework", "model", "method", "finetuning", "id"):
        if _ADAPTERS.search((row.get(column) or "").lower()):
            raise CostModelError(
                f"{column} is {row[column]!r}: adapters (LoRA) beside frozen parameters are not priced"
            )
