"""Predictions beside published measurements: a file of rows to errors, per source and in all.

The format of a file is known by its columns. A row that cannot be priced is
skipped with its reason; nothing in it is guessed.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError
from cost_models.published import Priced, price_collective, price_matmul

WORST = 5
"""How many rows of largest error a report names."""


class ValidationError(CostModelError):
    """A file of measurements that cannot be read at all."""


@dataclass(frozen=True)
class Format:
    """A kind of table: the columns that tell it, and what prices one of its rows."""

    name: str
    columns: tuple[str, ...]
    price: Callable[[Mapping[str, str], int], Priced] | None
    """None: rows of it are priced by whoever knows programs, see `validate`."""


TRAINING_STEPS = "training steps"
FORMATS = (
    Format(TRAINING_STEPS, ("framework", "device", "gpus"), None),
    Format("collectives", ("source", "hardware", "nodes", "gpus", "op", "bytes"), price_collective),
    Format("achievable matmuls", ("gpu", "dtype", "achieved", "best_shape_mxnxk"), price_matmul),
)


@dataclass(frozen=True)
class Skipped:
    """A row that was not priced, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Validation:
    """What became of the rows of one file."""

    format: str
    priced: tuple[Priced, ...]
    skipped: tuple[Skipped, ...]

    def _source(self, name: str) -> dict[str, Any]:
        rows = [each for each in self.priced if each.source == name]
        return statistics(rows) | {
            "rank_correlation": rank_correlation(rows),
            "memory_mean_abs_rel_error": memory_error(rows),
            "too_large": too_large(rows),
        }

    def document(self) -> dict[str, Any]:
        """Return the report of `autopar validate --json`.

        Relative errors are predicted over measured, less 1; `bias` is their
        mean. `rank_correlation` is Spearman's, averaged over groups of at
        least three rows that differ in size only, by rows. `too_large` rows are predicted not to fit where they ran.
        `assumptions` are what rows do not say and were priced with, each with the lines of its rows.
        """
        sources = dict.fromkeys(each.source for each in self.priced)
        parts = dict.fromkeys(each.part for each in self.priced if each.part)
        worst = sorted(self.priced, key=lambda each: -abs(each.error))[:WORST]
        return {
            "format": self.format,
            **statistics(self.priced),
            "skipped": len(self.skipped),
            "rank_correlation": rank_correlation(self.priced),
            "memory_mean_abs_rel_error": memory_error(self.priced),
            "too_large": too_large(self.priced),
            "parts": {part: statistics(each for each in self.priced if each.part == part) for part in parts},
            "sources": {name: self._source(name) for name in sources},
            "worst": [
                {
                    "line": each.line,
                    "row": each.label,
                    "measured_s": each.measured_s,
                    "predicted_s": each.predicted_s,
                    "rel_error": each.error,
                }
                for each in worst
            ],
            "assumptions": [
                {"what": what, "lines": [each.line for each in self.priced if each.assumed == what]}
                for what in dict.fromkeys(each.assumed for each in self.priced if each.assumed)
            ],
            "skipped_rows": [{"line": each.line, "reason": each.reason} for each in self.skipped],
        }


_CAPITALS = (
    "intra_node_GB_per_s_per_gpu",
    "inter_node_Gbit_per_s_per_node",
    "peak_TFLOP_per_s",
    "memory_GiB",
    "memory_GB_per_s",
)
"""Columns whose names have capitals."""

_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("vp", "vpp", "virtual_pipeline", "virtual_stages"), "interleave"),
    **dict.fromkeys(("gpu_type", "gpu_name", "gpu_model", "device_name", "device_type", "accelerator"), "device"),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), "tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), "pp"),
    **dict.fromkeys(("data_parallel", "data_parallel_size", "dp_size"), "dp"),
    **dict.fromkeys(("context_parallel", "context_parallel_size", "cp_size"), "cp"),
    **dict.fromkeys(("expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "ep_size"), "ep"),
    **dict.fromkeys(("zero_stage", "sharding", "sharding_strategy"), "zero"),
    **dict.fromkeys(("mbs", "micro_batch_size", "microbatch"), "micro_batch"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "local_batch_size"), "micro_batch"),
    **dict.fromkeys(("ga", "gas", "grad_accum", "gradient_accumulation_steps"), "gradient_accumulation"),
    **dict.fromkeys(("gbs", "global_batch_size"), "global_batch"),
    **dict.fromkeys(("seq_length", "sequence_length", "seqlen"), "seq_len"),
    **dict.fromkeys(("num_layers", "n_layers"), "layers"),
    **dict.fromkeys(("num_heads", "n_heads"), "heads"),
    **dict.fromkeys(("hidden_size", "d_model"), "hidden"),
    **dict.fromkeys(("vocab_size",), "vocab"),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size"), "ffn_hidden"),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("n_gpus", "num_gpus"), "gpus"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "recomputation"), "recompute"),
    **dict.fromkeys(("step_time_s", "iteration_time_s", "seconds_per_step"), "measured_step_s"),
    **dict.fromkeys(("num_experts", "n_experts", "n_routed_experts", "num_moe_experts", "routed_experts"), "experts"),
    **dict.fromkeys(("experts_per_token", "moe_top_k", "num_experts_per_tok", "moe_router_topk"), "top_k"),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden"), "moe_ffn_hidden"),
    **dict.fromkeys(("first_k_dense_replace", "first_k_dense_layers", "num_dense_layers"), "first_k_dense"),
    **dict.fromkeys(("n_dense_layers", "dense_layers", "first_dense_layers"), "first_k_dense"),
    **dict.fromkeys(("shared_experts", "num_shared_experts"), "n_shared_experts"),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"), "shared_ffn_hidden"),
    **dict.fromkeys(("q_rank", "q_latent_dim"), "q_lora_rank"),
    **dict.fromkeys(("kv_rank", "kv_latent_dim"), "kv_lora_rank"),
    **dict.fromkeys(("qk_nope_dim", "nope_head_dim", "qk_head_dim"), "qk_nope_head_dim"),
    **dict.fromkeys(("qk_rope_dim", "rope_head_dim", "qk_pos_emb_head_dim"), "qk_rope_head_dim"),
    **dict.fromkeys(("v_dim", "value_head_dim"), "v_head_dim"),
    **dict.fromkeys(("num_decoder_layers", "n_decoder_layers", "dec_layers"), "decoder_layers"),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "n_encoder_layers"), "layers"),
    **dict.fromkeys(("decoder_seq_length", "seq_len_dec", "seq_length_dec", "target_seq_len"), "decoder_seq_len"),
    **dict.fromkeys(("encoder_seq_len", "encoder_seq_length"), "seq_len"),
    **dict.fromkeys(("mtp", "mtp_num_layers", "num_nextn_predict_layers", "mtp_depth"), "mtp_layers"),
    **dict.fromkeys(("peak_memory_gib", "max_memory_reserved_gib"), "measured_peak_gib"),
    **dict.fromkeys(("max_memory_allocated_gib", "peak_allocated_gib"), "measured_allocated_gib"),
    **dict.fromkeys(("tgs", "tokens_per_sec_per_gpu", "tokens_per_second_per_gpu"), "tokens_per_s_per_gpu"),
    **dict.fromkeys(("tokens_per_sec", "tokens_per_second"), "tokens_per_s"),
    **dict.fromkeys(("samples_per_sec", "samples_per_second"), "samples_per_s"),
}
"""What other tables call columns."""

_OF_RUNS: Mapping[str, str] = {"gpu": "device", "hardware": "device", "dtype": "precision", "size": "model"}
"""The same in tables of training steps alone, where they lack the column."""

Row = tuple[int, Mapping[str, str]]
"""Line of the file, and its values by column."""

PriceSteps = Callable[[Sequence[Row]], Iterable[Priced | Skipped]]


def validate(path: Path, price_steps: PriceSteps | None = None) -> Validation:
    """Return every row of the file priced or skipped.

    `price_steps` prices rows of training steps, which takes more than cost models: a program and its plan.

    Raises `ValidationError` where the file cannot be read, its columns are
    those of no known format, or the format cannot be priced.
    """
    header, rows = _read(path)
    form = _format(path, header)
    found: list[Priced | Skipped] = []
    whole: list[Row] = []
    for line, cells in rows:
        if len(cells) != len(header):
            found.append(Skipped(line, f"has {len(cells)} values for {len(header)} columns"))
        else:
            whole.append((line, dict(zip(header, cells, strict=True))))
    if form.price is not None:
        found += [_priced(form.price, row) for row in whole]
    elif price_steps is not None:
        found += price_steps(whole)
    else:
        raise ValidationError(f"{path}: rows of {form.name} are priced by the command autopar validate")
    found.sort(key=lambda each: each.line)
    priced = tuple(each for each in found if isinstance(each, Priced))
    return Validation(form.name, priced, tuple(each for each in found if isinstance(each, Skipped)))


def _priced(price: Callable[[Mapping[str, str], int], Priced], row: Row) -> Priced | Skipped:
    line, values = row
    try:
        return price(values, line)
    except CostModelError as error:
        return Skipped(line, str(error))


def statistics(rows: Iterable[Priced]) -> dict[str, float | int | None]:
    """Return how many rows, and median, mean and bias of their relative errors; None for no rows."""
    errors = np.array([each.error for each in rows])
    if not errors.size:
        return {"rows": 0, "median_abs_rel_error": None, "mean_abs_rel_error": None, "bias": None}
    return {
        "rows": errors.size,
        "median_abs_rel_error": float(np.median(np.abs(errors))),
        "mean_abs_rel_error": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
    }


def memory_error(rows: Iterable[Priced]) -> float | None:
    """Return the mean absolute relative error of peak memory over the rows that have one measured; None for none."""
    errors = [abs(each.memory_error) for each in rows if each.memory_error is not None]
    return float(np.mean(errors)) if errors else None


def too_large(rows: Iterable[Priced]) -> int | None:
    """Return how many rows are predicted to take more memory than the device has that they ran on; None: not known."""
    known = [each.is_too_large for each in rows if each.device_bytes is not None]
    return sum(known) if known else None


def rank_correlation(rows: Sequence[Priced]) -> float | None:
    """Return Spearman's correlation of predicted and measured times within groups, weighted by rows.

    Groups of fewer than three rows say nothing; None where there are no others.
    """
    groups: dict[str, list[Priced]] = {}
    for each in rows:
        groups.setdefault(each.group, []).append(each)
    large = [group for group in groups.values() if len(group) >= 3]
    if not large:
        return None
    weighted = [
        len(group) * _spearman(np.array([each.predicted_s for each in group]), [each.measured_s for each in group])
        for group in large
    ]
    return float(sum(weighted) / sum(map(len, large)))


def _spearman(predicted: npt.NDArray[np.float64], measured: Sequence[float]) -> float:
    a, b = _ranks(predicted), _ranks(np.array(measured))
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ranks of the values; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2, dtype=np.float64)


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            written = [name.strip().lower() for name in next(reader, [])]
            header = _columns(written)
            rows = [(reader.line_num, cells) for cells in reader if cells]
    except OSError as error:
        raise ValidationError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValidationError(f"{path}: is no CSV file: {error}") from None
    if not header:
        raise ValidationError(f"{path}: is empty; its first line must name the columns")
    other = next((mark for mark in (";", "\t", "|") if mark in header[0]), "")
    if len(header) == 1 and other:
        raise ValidationError(f"{path}: its columns are separated by {other!r}; write commas, and points in numbers")
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        other = next((name for name, known in _OTHER_NAMES.items() if known == twice and name in written), "")
        raise ValidationError(f"{path}: names column {twice!r} twice" + (f", once as {other!r}" if other else ""))
    return header, rows


def _columns(written: Sequence[str]) -> list[str]:
    """Return the columns' names; those of a framework's runs are less bound than those of other tables."""
    header = [_column(name) for name in written]
    if "framework" not in header:
        return header
    more = {name: known for name, known in _OF_RUNS.items() if known not in header}
    first = {known: next((name for name in header if more.get(name) == known), "") for known in more.values()}
    return [more[name] if name in more and first[more[name]] == name else name for name in header]


def _column(name: str) -> str:
    """Return a column's name as the formats have it, however capitals are set, and by its other names."""
    small = name.strip().lower()
    return next((each for each in _CAPITALS if each.lower() == small), _OTHER_NAMES.get(small, small))


def _format(path: Path, header: Sequence[str]) -> Format:
    for form in FORMATS:
        if set(form.columns) <= set(header):
            return form
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in FORMATS)
    nearest = max(FORMATS, key=lambda form: len(set(form.columns) & set(header)) / len(form.columns))
    missing = ", ".join(name for name in nearest.columns if name not in header)
    near = f" (as {nearest.name}, it lacks {missing})" if set(nearest.columns) & set(header) else ""
    raise ValidationError(f"{path}: its columns are those of no known table{near}; known are {known}")
