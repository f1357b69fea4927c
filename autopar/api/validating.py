"""Published training steps through the normal path: the row's model captured, its degrees fixed, the plan priced."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import nn

from autopar.api.as_run import AsRun
from autopar.api.describing import PEAK_DTYPE
from autopar.api.wishes import read_wishes
from autopar.capture import capture
from autopar.capture.autocasting import autocast_as_on_gpu
from autopar.capture.deepen import deepened
from autopar.capture.gradients import gradients_in_float32
from autopar.capture.positions import balanced_positions
from autopar.capture.recompute import Way, Ways, recomputed_graph
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Estimates, Memory
from autopar.ir.repetition import FEW, Repetition
from autopar.models.zoo.gpt import GptSettings
from autopar.models.zoo.llama import LlamaSettings
from autopar.models.zoo.seq2seq import Seq2SeqSettings
from autopar.options import PlanOptions
from autopar.search.meshes import Candidate, MeshAxis, Role
from autopar.search.trials import Trial, Uniform
from cost_models.errors import CostModelError
from cost_models.memory import WHOLLY_SHARDED, Flat, at_once_bytes, flat_bytes, process_bytes
from cost_models.published import Priced
from cost_models.training_rows import (
    Architecture,
    TrainingRow,
    read_training_row,
    training_cluster,
)
from cost_models.validation import Row, Skipped

_VOCAB_MULTIPLE = 128
"""Training codes pad the vocabulary to a multiple of this for each tensor-parallel rank (Megatron-LM's default)."""


class ProgramKey(NamedTuple):
    """What decides a row's program."""

    sizes: Architecture
    vocab: int
    """As padded."""

    batch: int
    seq: int
    precision: str
    autocasts: bool
    float32_parameters: bool
    float32_gradients: bool
    float32_loss: bool
    balanced: bool
    """Whether ranks may split positions of causal attention."""

    joined: bool
    """Whether a layer's products of one input are one."""

    weighs_inside: bool
    """Whether experts' activations are multiplied by the tokens' weights, not what experts make."""


_DROPOUT = 0.1
"""Of attention's scores and of what layers add, where there is any: the default of GPT codes before fused attention."""

_BALANCED = 1.0
"""Room of an expert over an even share: no token is dropped, and none of the published tables is of uneven shares."""

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TIME_LIMIT_S = 60.0

_SHARDED_GRADIENTS = 2
"""The stage of ZeRO that shards gradients and the optimizer's state, and no parameters."""


def price_steps(rows: Sequence[Row], workers: int = 0) -> Iterator[Priced | Skipped]:
    """Yield every row with the time and memory that its plan is predicted to take, or why it has none.

    Rows of one program follow one another, so that it is captured once; programs are spread over `workers` processes,
    0: as many as there are processors.
    """
    runs: dict[object, list[Row]] = {}
    found: list[Priced | Skipped] = []
    for row in rows:
        try:
            runs.setdefault(_program_key(read_training_row(row[1])), []).append(row)
        except CostModelError as error:
            found.append(Skipped(row[0], str(error)))
    yield from found
    workers = min(len(runs), workers or os.cpu_count() or 1)
    if workers < 2:
        for run in runs.values():
            yield from _price_run(run)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for priced in pool.map(_price_run, runs.values()):
            yield from priced


def _price_run(rows: Sequence[Row]) -> list[Priced | Skipped]:
    return [_price(line, read_training_row(values)) for line, values in rows]


def _price(line: int, read: TrainingRow) -> Priced | Skipped:
    try:
        found = estimates_of(read)
    except (AutoparError, CostModelError) as error:
        return Skipped(line, str(error))
    return Priced(
        line=line,
        label=read.label,
        source=read.source,
        group=f"{read.source}|{read.model}|{read.device}|{read.gpus}",
        part="",
        measured_s=read.measured_step_s,
        predicted_s=found.step_time_s,
        measured_bytes=read.measured_peak_bytes,
        predicted_bytes=_process_bytes(read, found.memory),
        device_bytes=read.spec.memory_bytes,
        assumed=read.assumed,
    )


def _process_bytes(read: TrainingRow, held: Memory) -> float:
    """Return what is predicted of a process: tensors, and what the software and the allocator have beside them.

    Of rows that print what tensors took, of these alone.
    """
    short = read.precision != "fp32"
    flat = Flat()
    if short and read.stack.flat_copies:
        item = 4 if read.stack.float32_gradients and read.precision == "bf16" else 2
        flat = flat_bytes(held.parameters / 2, held.optimizer, item, zero=read.zero, replicas=read.dp_shard * read.cp)
    # One for each axis, and one over all model-parallel ranks, which add up norms.
    degrees = (read.dp, read.tp, read.pp, read.cp, read.ep)
    groups = sum(degree > 1 for degree in degrees) + (read.tp > 1 < read.pp) + read.is_hybrid
    # Stage 2 scatters each micro-batch's gradients, and holds sums of its own part.
    gradients = held.gradients / (read.dp_shard * read.cp) if read.zero == _SHARDED_GRADIENTS else held.gradients
    resting = held.parameters + gradients + held.optimizer
    moving = held.activations + held.temporary
    if read.measured_alone:
        return resting + at_once_bytes(moving, flat)
    return process_bytes(resting, moving, read.spec, groups=groups, flat=flat)


def estimates_of(read: TrainingRow) -> Estimates:
    """Return what is predicted of a row: everything fixed that the row says.

    Raises:
        AutoparError: the model cannot be captured or the configuration not planned.
        CostModelError: the cluster cannot be described.
    """
    options = PlanOptions.parse(fix=_fixed(read), precision=read.precision, optimizer="adamw", time_limit=_TIME_LIMIT_S)
    count = read.global_batch // (read.dp * read.micro_batch)
    way = _recompute(read)
    trial = Trial(_axes(read, count), read.pp, way)
    way_priced = _as_its_stack(way, read)
    narrow = bool(read.narrow) and read.stack.keeps_narrow
    # Reentrant checkpointing breaks what is compiled off, and of gathered tokens nothing is made again (`_recompute`).
    loss = read.stack.reruns_loss and way_priced != "whole" and not read.sequence_parallel
    graph = _recomputed(_program_key(read), way_priced, parts=read.stack.fuses_parts, narrow=narrow, loss=loss)
    dtype = PEAK_DTYPE[read.precision]
    solving = AsRun(
        graph,
        training_cluster(read),
        options,
        stack=read.stack,
        masters=not read.pure,
        mixture=read.architecture.mixture,
        sharded_optimizer=read.shards_states,
        replicas=read.dp_shard * read.cp,
        scatters_each=read.zero == _SHARDED_GRADIENTS,
        peak_dtype=dtype,
        offloaded=read.offloaded,
    )
    # What was measured reduced every gradient and gathered every parameter. FSDP shards what a tensor-parallel rank has
    # of a matrix, which in the layouts of plans is a shard of its other dimension: as many bytes.
    wishes = replace(read_wishes(options), moves_activations=False, any_dim=read.tp > 1)
    return solving.estimates(trial, wishes)


def _axes(read: TrainingRow, microbatches: int) -> Candidate:
    """Return the axes of a row's ranks, outermost first, each of more than one."""
    inner: Role = "dp_shard" if read.zero == WHOLLY_SHARDED else "dp_replicate"
    outer = read.dp // (read.dp_shard * read.ep)
    axes = (
        MeshAxis("microbatch", microbatches),
        MeshAxis("dp_replicate", outer),
        MeshAxis(inner, read.dp_shard),
        MeshAxis("cp", read.cp),
        MeshAxis("ep", read.ep),
        MeshAxis("tp", read.tp),
    )
    return tuple(axis for axis in axes if axis.size > 1)


@lru_cache(maxsize=2)
def _recomputed(key: ProgramKey, way: Uniform, *, parts: bool, narrow: bool, loss: bool) -> Graph:
    """Return a program in which what is recomputed runs again; what is known of the graph stays known for all rows.

    `parts`: so does what kernels of whole norms, gated activations and rotations do not keep for backward. `narrow`:
    linear layers keep what they cast. `loss`: so does what of the loss does not compute.
    """
    graph = _graph(key)
    if way != "none" or parts or loss:
        ways: Way | Ways = {} if way == "none" else way
        graph = recomputed_graph(graph, ways, redraws=True, parts=parts, outside="cheap" if loss else None)
    return replace(graph, keeps_narrow=True) if narrow else graph


def _recompute(read: TrainingRow) -> Uniform:
    match read.recompute:
        case "selective":
            return "per_operator" if read.stack.per_operator else "selective"
        case "full":
            return "full"
    # torch.compile runs no collective again: what ranks gather is kept, and nothing before it is computed for it.
    return "cheap" if read.stack.reruns_cheap and not read.sequence_parallel else "none"


def _as_its_stack(way: Uniform, read: TrainingRow) -> Uniform:
    """Return what a row's software runs again under that name: layers to their ends, all but products."""
    if way == "full" and read.stack.reruns_all:
        return "whole"
    return "products" if way == "selective" and read.stack.saves_products else way


def _fixed(read: TrainingRow) -> dict[str, int | str | bool]:
    """Return a row's degrees and choices as `--fix` takes them."""
    # What is sharded is so over the ranks of a sequence as well, be there no others.
    sharded = read.zero == WHOLLY_SHARDED and read.dp * read.cp > 1
    shards = read.dp_shard if sharded else 1
    fixed: dict[str, int | str | bool] = {
        "dp_replicate": read.dp // (shards * read.ep),
        "dp_shard": shards,
        "cp": read.cp,
        "ep": read.ep,
        "tp": read.tp,
        "pp": read.pp,
        "interleave": read.interleave,
        "microbatch": read.micro_batch,
        "recompute": _recompute(read),
        "zero": read.zero if sharded else 0,
    }
    return fixed | ({"sequence_parallel": read.sequence_parallel} if read.tp > 1 else {})


def _program_key(read: TrainingRow) -> ProgramKey:
    """Return what decides a row's program: sizes, vocabulary as padded, batch, sequence, types."""
    short = read.stack.float32_gradients and read.precision == "bf16"
    multiple = _VOCAB_MULTIPLE * read.tp if read.stack.pads else read.tp
    vocab = read.architecture.vocab
    if vocab % max(multiple // 2, read.tp):
        vocab = -(-vocab // multiple) * multiple
    return ProgramKey(
        read.architecture,
        vocab,
        read.global_batch,
        read.seq_len,
        read.precision,
        autocasts=read.stack.autocasts,
        float32_parameters=read.stack.float32_parameters,
        float32_gradients=short,
        float32_loss=not read.stack.keeps_short_logits,
        balanced=read.cp > 1 and read.stack.balances,
        joined=read.stack.joins and read.architecture.family == "llama",
        weighs_inside=read.stack.weighs_inside_from > 0 and read.architecture.mixture is not None,
    )


@lru_cache(maxsize=2)
def _graph(key: ProgramKey) -> Graph:
    """Return the program of a model at full depth, its parameters of the precision's type but where they are cast."""
    sizes = key.sizes
    first = sizes.mixture.dense_layers if sizes.mixture is not None else 0
    settings = replace(_settings(sizes, key, min(sizes.layers, first + FEW)), float32_loss=key.float32_loss)
    with torch.device("meta"):
        model = settings.model().to(torch.float32 if key.float32_parameters else _TYPES[key.precision]).train()
        inputs = settings.inputs(key.batch, key.seq)
    with autocast_as_on_gpu(_TYPES[key.precision]) if key.autocasts else nullcontext():
        graph = capture(model, inputs).graph
    rows = {path: len(each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    for path, depth in zip(rows, (sizes.layers + sizes.further, sizes.decoder_layers), strict=False):
        if depth > rows[path]:
            behind = rows[path] - FEW - first
            graph = deepened(graph, {path: Repetition(depth - first - behind, before=first, behind=behind)})
    graph = balanced_positions(graph) if key.balanced else graph
    return gradients_in_float32(graph) if key.float32_gradients else graph


def _settings(sizes: Architecture, key: ProgramKey, layers: int) -> GptSettings | LlamaSettings | Seq2SeqSettings:
    if sizes.decoder_layers:
        return Seq2SeqSettings(
            layers=layers,
            # What the last layer of a decoder adds to the encoder's gradient begins their sum: it is no other's equal.
            decoder_layers=min(sizes.decoder_layers, FEW + 1),
            hidden=sizes.hidden,
            heads=sizes.heads,
            head_size=sizes.head_size,
            intermediate=sizes.ffn_hidden,
            gated=sizes.gated,
            vocab=key.vocab,
            positions=key.seq,
            decoder_positions=sizes.decoder_seq,
            fused_attention=sizes.fused_attention,
            dropout=_DROPOUT if sizes.drops else 0.0,
        )
    if sizes.family == "llama":
        return _llama(sizes, key, layers)
    return GptSettings(
        layers=layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        intermediate=sizes.ffn_hidden,
        vocab=key.vocab,
        positions=key.seq,
        causal=sizes.causal,
        tied=not (sizes.is_nemotron or sizes.is_neox),
        bias=not sizes.is_nemotron,
        squared_relu=sizes.is_nemotron,
        fused_gelu=sizes.fused_gelu,
        rotary_positions=sizes.is_nemotron or sizes.is_neox,
        fused_attention=sizes.fused_attention,
        dropout=_DROPOUT if sizes.drops else 0.0,
    )


def _llama(sizes: Architecture, key: ProgramKey, layers: int) -> LlamaSettings:
    settings = LlamaSettings(
        layers=layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        intermediate=sizes.ffn_hidden,
        vocab=key.vocab,
        sequence=key.seq,
        joined=key.joined,
        fused_attention=sizes.fused_attention,
        head_size=sizes.head_size,
        qk_norm=sizes.qk_norm,
        capacity_factor=_BALANCED,
        predictions=sizes.further,
    )
    if (mixture := sizes.mixture) is not None:
        settings = replace(
            settings,
            intermediate=mixture.ffn,
            experts=mixture.experts,
            experts_per_token=mixture.chosen,
            weighs_inside=key.weighs_inside,
            shared_intermediate=mixture.shared_ffn,
            dense_layers=mixture.dense_layers,
            dense_intermediate=mixture.dense_ffn,
        )
    if (latent := sizes.latent) is not None:
        settings = replace(
            settings,
            kv_rank=latent.kv_rank,
            q_rank=latent.q_rank,
            plain_size=latent.plain,
            rotated_size=latent.rotated,
            value_size=latent.values,
        )
    return settings
