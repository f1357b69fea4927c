"""Published training steps: one row of a table to the configuration that was measured.

A row is read as it was published; what it does not say, or says in a way that cannot be, is an error that names the
column. Columns: benchmarks/data/README.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models import catalog
from cost_models.cluster import ClusterSpec
from cost_models.cluster_file import shorthand_node
from cost_models.device_names import catalogued_name
from cost_models.errors import CostModelError
from cost_models.node import LinkSpec, NodeGroup, catalogued_link
from cost_models.stack import Stack, is_known, stack_of

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

WHOLLY_SHARDED = 3
"""ZeRO stage at which parameters are sharded at rest."""

_RECOMPUTE = ("none", "selective", "full")
_PRECISIONS = ("fp32", "bf16", "fp16")
_TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FAMILIES = ("gpt", "llama")
_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")
_ANSWERS = (*_YES, *_NO)
_NEUTRAL = frozenset({"", "0", "1", "no", "none", "n/a", "false"})
_UNPRICED: Mapping[str, str] = {
    "experts": "steps of mixtures of experts are not priced from a table",
    "num_experts": "steps of mixtures of experts are not priced from a table",
    "ep": "experts split over ranks are not priced",
    "cp": "sequences split over ranks by context parallelism are not priced",
    "offload": "state kept in the host's memory is not priced",
}
"""Columns that other tables have, and what is not priced of them: a row is refused rather than priced without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a model."""

    family: str
    """`gpt` or `llama`, see the data's README."""

    is_nemotron: bool
    """Of the GPT family: squared ReLU, rotary positions, no biases, an output embedding of its own."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    fused_attention: bool


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
    gpus: int
    gpus_per_node: int
    link_bytes_per_s: float
    nic_bytes_per_s: float
    fabric: str
    seq_len: int
    precision: str
    dp: int
    tp: int
    pp: int
    interleave: int
    sequence_parallel: bool
    zero: int
    micro_batch: int
    global_batch: int
    recompute: str
    measured_step_s: float
    measured_peak_bytes: float | None
    assumed: str = ""
    """What the row does not say and was assumed; empty: nothing."""

    @property
    def label(self) -> str:
        """Return how a report names the row."""
        degrees = f"dp {self.dp} tp {self.tp} pp {self.pp}" + (f"x{self.interleave}" if self.interleave > 1 else "")
        batch = f"batch {self.micro_batch}/{self.global_batch} x {self.seq_len}"
        more = f"zero {self.zero}, recompute {self.recompute}"
        return f"{self.id}: {self.model} on {self.gpus} {self.device}, {degrees}, {batch}, {more}"


def read_training_row(row: Mapping[str, str]) -> TrainingRow:
    """Return what a row of `training_steps.csv` says.

    Raises `CostModelError` for what the row does not say, what cannot be, and devices that the catalogue does not know.
    """
    device = catalogued_name(_text(row, "device"))
    architecture = _architecture(row)
    _refuse_unsaid(row)
    zero = int(_choice(row, "zero", ("0", "1", "2", "3")))
    interleave = 1 if (row.get("interleave") or "").strip() in {"", "0"} else _count(row, "interleave")
    stages = _count(row, "pp") * interleave
    framework = _text(row, "framework")
    stack = stack_of(framework, _is_yes(row.get("compiled") or "")).at_zero(zero)
    read = TrainingRow(
        id=_text(row, "id"),
        source=_text(row, "source"),
        model=_text(row, "model"),
        architecture=architecture,
        stack=stack.of_year(_count(row, "year")).cut(architecture.layers, stages),
        year=_count(row, "year"),
        device=device,
        gpus=_count(row, "gpus"),
        gpus_per_node=_count(row, "gpus_per_node"),
        link_bytes_per_s=_number(row, "intra_node_GB_per_s_per_gpu") * _GB,
        nic_bytes_per_s=_number(row, "inter_node_Gbit_per_s_per_node") * _GBIT,
        fabric=row.get("fabric_note") or "",
        seq_len=_count(row, "seq_len"),
        precision=_precision(row),
        dp=_count(row, "dp"),
        tp=_count(row, "tp"),
        pp=_count(row, "pp"),
        interleave=interleave,
        sequence_parallel=_choice(row, "sequence_parallel", _ANSWERS) in _YES,
        zero=zero,
        micro_batch=_count(row, "micro_batch"),
        global_batch=_count(row, "global_batch"),
        recompute=_choice(row, "recompute", _RECOMPUTE),
        measured_step_s=_positive(row, "measured_step_s"),
        measured_peak_bytes=_peak_bytes(row),
        assumed="" if is_known(framework) else f"framework {framework!r} is not known: priced as plain PyTorch",
    )
    _check(read)
    return read


def evenly_sharded(read: TrainingRow) -> TrainingRow:
    """Return the row on as many data-parallel ranks as divide what they shard: as it is where its own do.

    FSDP pads what it shards (flat parameters, or each in its first dimension), so that any number of ranks will do;
    layouts here are even. A rank's work and traffic hardly depend on how many others there are: the nearest number
    of ranks, each with its own batch, that fill whole nodes and divide the hidden size, of which all matrices have a
    dimension. Where there is none, the row as it is.
    """
    hidden, dp = read.architecture.hidden, read.dp
    if read.zero != WHOLLY_SHARDED or hidden % dp == 0:
        return read
    per_rank = read.gpus // dp
    fitting = [n for n in range(2, 2 * dp + 1) if hidden % n == 0 and _fills_nodes(read, n * per_rank)]
    if not fitting:
        return read
    best = min(fitting, key=lambda n: max(n, dp) / min(n, dp))
    return replace(read, dp=best, gpus=best * per_rank, global_batch=read.global_batch // dp * best)


def _fills_nodes(read: TrainingRow, gpus: int) -> bool:
    """Return whether devices fill nodes, and are on one if the row's are."""
    per_node = read.gpus_per_node
    return gpus <= per_node if read.gpus <= per_node else gpus > per_node and gpus % per_node == 0


def training_cluster(read: TrainingRow) -> ClusterSpec:
    """Return the row's machines, their devices with the software that ran on them."""
    per_node = _joined(read)
    node = shorthand_node(read.device, per_node)
    device = replace(read.stack.on(node.device, read.year), host_waits=_host_waits(read))
    links = node.links and replace(node.links, bytes_per_s=read.link_bytes_per_s or node.links.bytes_per_s)
    nic_bytes_per_s = read.nic_bytes_per_s * per_node / min(read.gpus, read.gpus_per_node)
    nic = replace(_adapter(read), bytes_per_s=nic_bytes_per_s) if read.nic_bytes_per_s else node.nic
    node = replace(node, device=device, links=links, nic=nic)
    return ClusterSpec(read.id, (NodeGroup(node, read.gpus // per_node),))


def _joined(read: TrainingRow) -> int:
    """Return the devices that one domain of links joins: a node, or of a rack as many as divide the row's.

    A row may count such a rack by its trays (4 devices of 72) or in whole.
    """
    domain = _link_domain(read.device)
    if not domain:
        return min(read.gpus, read.gpus_per_node)
    return next(count for count in range(min(domain, read.gpus), 0, -1) if read.gpus % count == 0)


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


def _architecture(row: Mapping[str, str]) -> Architecture:
    return Architecture(
        family=_choice(row, "family", _FAMILIES),
        is_nemotron="nemotron" in row.get("model", "").lower(),
        layers=_count(row, "layers"),
        hidden=_count(row, "hidden"),
        heads=_count(row, "heads"),
        kv_heads=_count(row, "kv_heads"),
        ffn_hidden=_count(row, "ffn_hidden"),
        vocab=_count(row, "vocab"),
        fused_attention=_choice(row, "attention", ("flash", "unfused")) == "flash",
    )


def _check(read: TrainingRow) -> None:
    sizes = read.architecture
    if read.dp * read.tp * read.pp != read.gpus:
        raise CostModelError(f"dp {read.dp} x tp {read.tp} x pp {read.pp} is not the {read.gpus} GPUs")
    if read.gpus > read.gpus_per_node and read.gpus % read.gpus_per_node and not _link_domain(read.device):
        raise CostModelError(f"{read.gpus} GPUs do not fill nodes of {read.gpus_per_node}")
    if read.gpus > read.gpus_per_node and not read.nic_bytes_per_s:
        raise CostModelError(
            f"{read.gpus} GPUs on nodes of {read.gpus_per_node}, and no inter_node_Gbit_per_s_per_node"
        )
    if read.global_batch % (read.dp * read.micro_batch):
        raise CostModelError(
            f"a batch of {read.global_batch} does not divide into micro-batches of {read.micro_batch} on {read.dp} GPUs"
        )
    if sizes.hidden % sizes.heads or sizes.heads % sizes.kv_heads:
        raise CostModelError(f"hidden {sizes.hidden}, heads {sizes.heads} and kv_heads {sizes.kv_heads} do not divide")
    if read.interleave > 1 and read.pp == 1:
        raise CostModelError(f"interleave is {read.interleave} without pipeline stages")


def _refuse_unsaid(row: Mapping[str, str]) -> None:
    """Raise for columns beyond those of the format that say what a price would have to know, and does not."""
    for column, what in _UNPRICED.items():
        if (row.get(column) or "").strip().lower() not in _NEUTRAL:
            raise CostModelError(f"{column} is {row[column]!r}: {what}")


def _text(row: Mapping[str, str], column: str) -> str:
    found = (row.get(column) or "").strip()
    if not found:
        raise CostModelError(f"{column} is missing")
    return found


def _choice(row: Mapping[str, str], column: str, known: tuple[str, ...]) -> str:
    found = _text(row, column).lower()
    if found not in known:
        raise CostModelError(f"{column} is {found!r}, not one of {', '.join(known)}")
    return found


def _peak_bytes(row: Mapping[str, str]) -> float | None:
    said = (row.get("measured_peak_gib") or "").strip()
    return _positive(row, "measured_peak_gib") * 2**30 if said else None


def _precision(row: Mapping[str, str]) -> str:
    """Return the type of mixed precision, by torch's name or the short one."""
    name = _TYPE_NAMES.get(_text(row, "precision").lower())
    return name or _choice(row, "precision", _PRECISIONS)


def _is_yes(text: str) -> bool:
    return text.strip().lower() in _YES


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        value = float(_text(row, column))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CostModelError(f"{column} is {row[column]!r}, not a number of at least 0")
    return value


def _positive(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column)
    if not value:
        raise CostModelError(f"{column} is {row[column]!r}, not a number above 0")
    return value


def _count(row: Mapping[str, str], column: str) -> int:
    value = _positive(row, column)
    if value != int(value):
        raise CostModelError(f"{column} is {row[column]!r}, not a whole number")
    return int(value)
