"""Published training steps: one row of a table to the configuration that was measured.

A row is read as it was published; what it does not say, or says in a way that cannot be, is an error that names the
column. Columns: benchmarks/data/README.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from cost_models import catalog
from cost_models.cell_words import (
    described_device,
    device_of,
    drops,
    family_of,
    fuses_attention,
    fuses_gelu,
    is_compiled,
    is_encoder,
    is_pure,
    precision_of,
    recompute_of,
    shard_group_of,
    zero_stage_of,
)
from cost_models.cells import (
    answer_of,
    count_of,
    degree_of,
    has_degree,
    peak_bytes_of,
    rate_of,
    said,
    step_s_of,
    text_of,
)
from cost_models.cluster import ClusterSpec
from cost_models.cluster_file import shorthand_node
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.errors import CostModelError
from cost_models.experts_cells import Latent, Mixture, further_of, latent_of, mixture_of
from cost_models.frameworks import is_known, stack_of
from cost_models.host_cells import offloaded_of
from cost_models.missing_cells import batches_of, ffn_of, optimizer_of, per_node_of, refuse_adapters, year_of
from cost_models.node import LinkSpec, NodeGroup, catalogued_link
from cost_models.stack import Stack
from cost_models.topology import links_share

_GB, _GBIT = 1e9, 1e9 / 8
_FABRICS = (
    (r"omni-?path", "omni-path-100g"),
    (r"\befa\b", "efa-3200g"),
    (r"roce|ethernet", "roce"),
    (r"infiniband", "8x400g-ib-ndr"),
    (r"slingshot", "4x200g-slingshot"),
    (r"", "unnamed"),
)
"""What a note calls a fabric, to the adapter whose efficiency and latency it has."""

_UNKNOWN = "a100-sxm-80gb"
"""The device whose kind of links, and adapters, one has that a row describes; their rates are the row's."""

_UNPRICED: Mapping[str, str] = {
    "offload": "state kept in the host's memory is not priced",
    **dict.fromkeys(("lora", "lora_rank", "peft"), "adapters beside frozen parameters are not priced"),
}
"""Columns that other tables have, and what is not priced of them: a row is refused rather than priced without."""

_NEOX = r"neox|pythia|gpt-?j\b"
"""What names of models contain that EleutherAI's configurations describe: `rotary_pct`, `no_weight_tying`."""

_QK_NORM = r"qwen.?3|gemma.?3"
"""What names of models contain that normalise queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a model."""

    family: str
    """`gpt`, `llama` or `seq2seq`, see the data's README."""

    is_nemotron: bool
    """Of the GPT family: squared ReLU, rotary positions, no biases, an output embedding of its own."""

    is_neox: bool
    """Of the GPT family: rotary positions, an output embedding of its own (GPT-NeoX, Pythia, GPT-J)."""

    causal: bool
    """Whether a position sees those before it alone."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    fused_attention: bool
    fused_gelu: bool = True
    """Of the GPT family: whether GELU is one operator, or those of its formula."""

    drops: bool = False
    """Whether it is trained with dropout."""

    head_size: int = 0
    """Of one head; 0: its share of `hidden`."""

    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""

    mixture: Mixture | None = None
    """Its experts; None: it is no mixture of experts, and its feed-forward one of `ffn_hidden`."""

    latent: Latent | None = None
    decoder_layers: int = 0
    """Of an encoder with a decoder, the latter's; `layers` are the encoder's."""

    decoder_seq: int = 0
    gated: bool = False
    """Of an encoder with a decoder: whether its feed-forward is gated (T5 1.1, mT5)."""

    further: int = 0
    """Layers behind the last that predict further tokens, one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One configuration that somebody ran, and what it took."""

    id: str
    source: str
    model: str
    architecture: Architecture
    stack: Stack
    year: int
    device: str
    """Of the catalogue, or a name for the one that the row describes."""

    gpus: int
    gpus_per_node: int
    link_bytes_per_s: float
    nic_bytes_per_s: float
    fabric: str
    seq_len: int
    precision: str
    narrow: str
    """The type in which linear layers of blocks compute, where it is another (`fp8`)."""

    pure: bool
    """Whether nothing is kept of parameters in more bits than their own: no float32 copies, no float32 state."""

    dp: int
    dp_shard: int
    """Data-parallel ranks, neighbours, over which `zero` shards; what it shards is replicated across such groups."""

    tp: int
    pp: int
    cp: int
    ep: int
    """Ranks, of the data-parallel ones, over which experts are split."""

    interleave: int
    sequence_parallel: bool
    zero: int
    micro_batch: int
    global_batch: int
    recompute: str
    measured_step_s: float
    measured_peak_bytes: float | None
    measured_alone: bool = False
    """Whether that is what tensors took (`torch.cuda.max_memory_allocated`), not what a process held."""

    offloaded: int = 0
    """Layers, the first, whose activations wait in the host's memory for backward."""

    described: DeviceSpec | None = None
    """The device by the row's figures; None: it is the catalogue's."""

    assumed: str = ""
    """What the row does not say and was assumed; empty: nothing."""

    @property
    def spec(self) -> DeviceSpec:
        """Return the device, without the software that ran on it."""
        return self.described or catalogued_device(self.device)

    @property
    def shards_states(self) -> bool:
        """Return whether a rank updates a part of the parameters that it holds whole, by ZeRO or without saying so."""
        if self.zero or self.pure or self.precision != "bf16":
            return self.zero in {1, 2}
        return self.stack.shards_states_from > 0

    @property
    def joined_like(self) -> str:
        """Return the catalogue's device whose kind of links the row's are."""
        return self.device if self.described is None else _UNKNOWN

    @property
    def is_hybrid(self) -> bool:
        """Return whether what is sharded is so over a part of the ranks that could share it, and replicated across."""
        return self.zero > 0 and self.dp_shard * self.ep < self.dp

    @property
    def label(self) -> str:
        """Return how a report names the row."""
        degrees = f"dp {self.dp}" + (f"/{self.dp_shard}" if self.is_hybrid else "") + f" tp {self.tp} pp {self.pp}"
        degrees += f"x{self.interleave}" if self.interleave > 1 else ""
        degrees += "".join(f" {name} {size}" for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1)
        batch = f"batch {self.micro_batch}/{self.global_batch} x {self.seq_len}"
        more = ", ".join(filter(None, (f"zero {self.zero}", f"recompute {self.recompute}", self.narrow)))
        return f"{self.id}: {self.model} on {self.gpus} {self.device}, {degrees}, {batch}, {more}"


def read_training_row(row: Mapping[str, str]) -> TrainingRow:
    """Return what a row of `training_steps.csv` says.

    Raises `CostModelError` for what the row does not say, what cannot be, and devices that the catalogue does not know.
    """
    link_gb_per_s = rate_of(row, "intra_node_GB_per_s_per_gpu")
    described = described_device(row)
    device, of_device = device_of(row, link_gb_per_s) if described is None else (described.name, "")
    architecture, of_sizes = _architecture(row)
    _refuse_unsaid(row)
    zero = zero_stage_of(row)
    interleave = degree_of(row, "interleave")
    tp, pp, cp, ep = (degree_of(row, name) for name in ("tp", "pp", "cp", "ep"))
    stages = pp * interleave
    dp, of_replicas = _replicas(row, tp * pp * cp)
    per_node, of_node = per_node_of(row)
    micro_batch, global_batch = batches_of(row, dp)
    peak_bytes, alone = peak_bytes_of(row)
    _require_experts(ep, dp, architecture)
    framework = text_of(row, "framework")
    of_framework = "" if is_known(framework) else f"framework {framework!r} is not known: priced as plain PyTorch"
    precision, narrow = precision_of(row)
    stack = stack_of(framework, is_compiled(row)).at_zero(zero)
    year = year_of(row)
    stack = stack.of_year(year).cut(architecture.layers, stages)
    read = TrainingRow(
        id=(row.get("id") or "").strip() or "row",
        source=(row.get("source") or "").strip() or "no source named",
        model=(row.get("model") or "").strip() or architecture.family,
        architecture=architecture,
        stack=_as_said(stack, row, precision, zero),
        year=year,
        device=device,
        described=described,
        gpus=count_of(row, "gpus"),
        gpus_per_node=per_node,
        link_bytes_per_s=link_gb_per_s * _GB,
        nic_bytes_per_s=rate_of(row, "inter_node_Gbit_per_s_per_node") * _GBIT,
        fabric=row.get("fabric_note") or "",
        seq_len=count_of(row, "seq_len"),
        precision=precision,
        narrow=narrow,
        pure=is_pure(row),
        dp=dp,
        dp_shard=shard_group_of(row, dp // ep, per_node // (tp * cp)),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        interleave=interleave,
        sequence_parallel=answer_of(row, "sequence_parallel"),
        zero=zero,
        micro_batch=micro_batch,
        global_batch=global_batch,
        recompute=recompute_of(row),
        measured_step_s=step_s_of(row),
        measured_peak_bytes=peak_bytes,
        measured_alone=alone,
        offloaded=offloaded_of(row, architecture.layers, stages),
        assumed="; ".join(filter(None, (of_device, *of_sizes, of_replicas, of_node, of_framework, optimizer_of(row)))),
    )
    _check(read)
    return _told_uneven(read)


def _as_said(stack: Stack, row: Mapping[str, str], precision: str, zero: int) -> Stack:
    """Return the stack as a row says it ran: of pure types, under autocast, replayed as CUDA graphs."""
    if said(row, "cuda_graphs"):
        stack = replace(stack, replays=answer_of(row, "cuda_graphs"), replays_from=0)
    if is_pure(row):
        return replace(stack.without_autocast(), float32_gradients=False)
    if said(row, "autocast"):
        told = replace(stack, autocasts=answer_of(row, "autocast"), autocasts_shards=True).at_zero(zero)
        stack = told if told.autocasts else stack.without_autocast()
    return stack.without_autocast() if precision == "fp32" else stack


def _require_experts(ep: int, dp: int, architecture: Architecture) -> None:
    experts = architecture.mixture.experts if architecture.mixture is not None else 0
    if ep > 1 and not experts:
        raise CostModelError(f"ep is {ep}, and the row says of no experts: add columns experts and top_k")
    if dp % ep or (ep > 1 and experts % ep):
        what = f"dp {dp}" if dp % ep else f"{experts} experts"
        raise CostModelError(f"ep is {ep}, which does not divide {what}")


def _told_uneven(read: TrainingRow) -> TrainingRow:
    """Return the row, with what is assumed of it where its ranks do not fill nodes evenly."""
    part = _joined(read)
    if part >= min(read.gpus, read.gpus_per_node) or _link_domain(read.joined_like):
        return read
    uneven = f"ranks do not lie evenly on nodes of {read.gpus_per_node}: priced as {part} each, with their share"
    return replace(read, assumed="; ".join(filter(None, (read.assumed, f"{uneven} of its adapters"))))


def training_cluster(read: TrainingRow) -> ClusterSpec:
    """Return the row's machines, their devices with the software that ran on them."""
    per_node = _joined(read)
    node = shorthand_node(read.joined_like, per_node)
    device = replace(_computing(read), host_waits=_host_waits(read))
    links = node.links
    if links is not None and per_node > 1:
        used = links_share(links.topology, per_node, max(read.gpus_per_node, per_node))
        links = replace(links, bytes_per_s=(read.link_bytes_per_s or links.bytes_per_s) * used)
    nic_bytes_per_s = read.nic_bytes_per_s * per_node / min(read.gpus, read.gpus_per_node)
    nic = replace(_adapter(read), bytes_per_s=nic_bytes_per_s) if read.nic_bytes_per_s else node.nic
    node = replace(node, device=device, links=links, nic=nic)
    return ClusterSpec(read.id, (NodeGroup(node, read.gpus // per_node),))


def _computing(read: TrainingRow) -> DeviceSpec:
    """Return the device with the software that ran on it, and what its products compute in."""
    device = read.stack.on(read.spec, read.year)
    if read.narrow != "tf32":
        return replace(device, narrow=read.narrow)
    # Products read float32 as it is: nothing is cast.
    return replace(
        device,
        peak_flops={**device.peak_flops, "float32": device.peak_flops["tf32"]},
        matmul_efficiency={**device.matmul_efficiency, "float32": device.matmul_efficiency_for("tf32")},
    )


def _joined(read: TrainingRow) -> int:
    """Return the devices that one domain of links joins: a node, or of a rack as many as divide the row's.

    A row may count such a rack by its trays (4 devices of 72) or in whole. Where groups of ranks end inside of nodes
    (dp 6 with tp 2 on nodes of 8), it is the largest part of a node in which none does.
    """
    domain = _link_domain(read.joined_like)
    whole = next(count for count in range(min(domain, read.gpus), 0, -1) if read.gpus % count == 0) if domain else 0
    whole = whole or min(read.gpus, read.gpus_per_node)
    parts = (count for count in range(whole, 0, -1) if whole % count == 0)
    return next((count for count in parts if _lies_evenly(read, count)), whole)


def _lies_evenly(read: TrainingRow, per_node: int) -> bool:
    """Return whether each group of ranks of a stage fills such nodes, or a part that divides them."""
    edges = tuple(accumulate((read.tp, read.ep, read.cp, read.dp_shard, read.dp // (read.dp_shard * read.ep)), mul))
    extent = min(per_node, edges[-1])
    return all(max(edge, extent) % min(edge, extent) == 0 for edge in edges)


def _link_domain(device: str) -> int:
    return int(catalog.number(catalog.entry("devices", device), "link_domain", 0))


def _adapter(read: TrainingRow) -> LinkSpec:
    return catalogued_link("nics", _fabric(read))


def _fabric(read: TrainingRow) -> str:
    return next(name for pattern, name in _FABRICS if re.search(pattern, read.fabric, re.IGNORECASE))


def _host_waits(read: TrainingRow) -> bool:
    """Return whether jobs of this many nodes ran on this fabric with the host waiting for each kernel only."""
    from_nodes = catalog.number(catalog.entry("nics", _fabric(read)), "host_waits_from", 0)
    return 0 < from_nodes <= read.gpus / read.gpus_per_node


def _replicas(row: Mapping[str, str], split: int) -> tuple[int, str]:
    """Return the data-parallel ranks, and what was assumed of them: those that the other degrees leave."""
    if said(row, "dp"):
        return count_of(row, "dp"), ""
    left = max(1, count_of(row, "gpus") // split)
    return left, f"dp is missing: {left}, which the other degrees leave"


def _architecture(row: Mapping[str, str]) -> tuple[Architecture, tuple[str, ...]]:
    """Return a row's sizes, and what was assumed of them."""
    family, of_family = family_of(row)
    heads = count_of(row, "heads")
    grouped = said(row, "kv_heads") != ""
    mixture, of_experts = mixture_of(row, family)
    latent, of_latent = latent_of(row, family)
    decoder, of_decoder = _decoder(row, family)
    fused, of_attention = fuses_attention(row)
    ffn, of_ffn = ffn_of(row, family)
    sizes = Architecture(
        family=family,
        is_nemotron="nemotron" in (row.get("model") or "").lower(),
        is_neox=re.search(_NEOX, row.get("model") or "", re.IGNORECASE) is not None,
        causal=not is_encoder(row),
        layers=count_of(row, "layers"),
        hidden=count_of(row, "hidden"),
        heads=heads,
        kv_heads=count_of(row, "kv_heads") if grouped else heads,
        ffn_hidden=ffn,
        vocab=count_of(row, "vocab"),
        fused_attention=fused,
        fused_gelu=fuses_gelu(row),
        drops=drops(row, fused=fused),
        head_size=0 if latent is not None else _head_size(row, family, heads),
        qk_norm=family == "llama" and re.search(_QK_NORM, row.get("model") or "", re.IGNORECASE) is not None,
        mixture=mixture,
        latent=latent,
        further=further_of(row) if family == "llama" else 0,
        decoder_layers=decoder[0],
        decoder_seq=decoder[1],
        gated=_is_gated(row, family),
    )
    of_groups = (
        ""
        if grouped or family == "seq2seq" or latent is not None
        else f"kv_heads is missing: as many as heads, {heads}"
    )
    return sizes, (of_family, of_experts, of_latent, of_decoder, of_groups, of_ffn, of_attention)


def _decoder(row: Mapping[str, str], family: str) -> tuple[tuple[int, int], str]:
    """Return the layers and the sequence of a row's decoder beside an encoder, and what was assumed of them."""
    if family != "seq2seq":
        return (0, 0), ""
    said_of = {"decoder_layers": "layers", "decoder_seq_len": "seq_len"}
    layers, seq = (count_of(row, own if said(row, own) else other) for own, other in said_of.items())
    missing = [own for own in said_of if not said(row, own)]
    return (layers, seq), f"{' and '.join(missing)} missing: the encoder's" if missing else ""


def _is_gated(row: Mapping[str, str], family: str) -> bool:
    """Return whether an encoder with a decoder has a gated feed-forward: as said, else where it is narrower than 4."""
    if family != "seq2seq":
        return False
    return answer_of(row, "gated") if said(row, "gated") else count_of(row, "ffn_hidden") < 4 * count_of(row, "hidden")


def _head_size(row: Mapping[str, str], family: str, heads: int) -> int:
    """Return a head's size where the row has another than its share of the hidden size; else 0."""
    said = degree_of(row, "head_dim")
    if said == 1 or said * heads == count_of(row, "hidden"):
        return 0
    if family == "gpt":
        share = count_of(row, "hidden") / heads
        raise CostModelError(
            f"head_dim is {said}, and hidden {row['hidden']} on {heads} heads is {share:g} each: heads of another size"
            " are priced of the llama family alone"
        )
    return said


def _check(read: TrainingRow) -> None:
    sizes = read.architecture
    if read.narrow and read.narrow not in read.spec.peak_flops:
        raise CostModelError(
            f"precision is {read.narrow}, for which {read.device} has no rate: it has {', '.join(read.spec.peak_flops)}"
        )
    if read.dp * read.tp * read.pp * read.cp != read.gpus:
        by_tokens = f" x cp {read.cp}" if read.cp > 1 else ""
        raise CostModelError(f"dp {read.dp} x tp {read.tp} x pp {read.pp}{by_tokens} is not the {read.gpus} GPUs")
    if sizes.decoder_layers and read.cp > 1:
        raise CostModelError(f"cp is {read.cp}: context parallelism of an encoder with a decoder is not priced")
    if read.seq_len % read.cp:
        raise CostModelError(f"a sequence of {read.seq_len} does not divide over cp {read.cp}")
    if sizes.mixture is not None and sizes.mixture.chosen > sizes.mixture.experts:
        raise CostModelError(f"top_k is {sizes.mixture.chosen} of {sizes.mixture.experts} experts")
    if sizes.mixture is not None and sizes.mixture.dense_layers >= sizes.layers:
        raise CostModelError(f"first_k_dense is {sizes.mixture.dense_layers} of {sizes.layers} layers")
    if read.gpus > read.gpus_per_node and read.gpus % read.gpus_per_node and not _link_domain(read.joined_like):
        raise CostModelError(f"{read.gpus} GPUs do not fill nodes of {read.gpus_per_node}")
    if read.gpus > max(read.gpus_per_node, _link_domain(read.joined_like)) and not read.nic_bytes_per_s:
        raise CostModelError(
            f"{read.gpus} GPUs on nodes of {read.gpus_per_node}, and no inter_node_Gbit_per_s_per_node"
        )
    if read.global_batch % (read.dp * read.micro_batch):
        raise CostModelError(
            f"a batch of {read.global_batch} does not divide into micro-batches of {read.micro_batch} on {read.dp} GPUs"
        )
    has_own_size = sizes.head_size or sizes.latent is not None
    if (sizes.hidden % sizes.heads and not has_own_size) or sizes.heads % sizes.kv_heads:
        raise CostModelError(f"hidden {sizes.hidden}, heads {sizes.heads} and kv_heads {sizes.kv_heads} do not divide")
    if read.interleave > 1 and read.pp == 1:
        raise CostModelError(f"interleave is {read.interleave} without pipeline stages")


def _refuse_unsaid(row: Mapping[str, str]) -> None:
    """Raise for columns beyond those of the format that say what a price would have to know, and does not."""
    refuse_adapters(row)
    for column, what in _UNPRICED.items():
        if has_degree(row, column):
            raise CostModelError(f"{column} is {row[column]!r}: {what}")
