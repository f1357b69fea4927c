"""Cells of a table of training steps: what their text says, or an error that names the column and what it may say."""

import re
from collections.abc import Mapping

from cost_models import catalog
from cost_models.device import DeviceSpec
from cost_models.device_file import read_device
from cost_models.device_names import catalogued_name
from cost_models.errors import ClusterError, CostModelError, suggestion
from cost_models.section import Section

Cells = Mapping[str, str]

_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")

_TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PRECISIONS = ("fp32", "bf16", "fp16")

_NARROW = re.compile(
    r"(?:amp[_ ]?|bf16[-+_ ]*)?(?:mx)?(?:fp8|float8)(?:[-_ ]?(?:hybrid|e4m3|e5m2|ds|cs|mx|sc|blockwise|mixed))*"
)
"""What texts call mixed precision whose linear layers compute in fp8: by format, by scaling, by Composer's name."""

_KIN: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "gpt3", "gptj", "gptneox", "pythia", "opt", "bloom", "falcon", "mpt", "nemotron"), "gpt"),
    **dict.fromkeys(("llama2", "llama3", "mistral", "qwen", "qwen2", "qwen3", "yi", "phi3"), "llama"),
    **dict.fromkeys(("internlm", "baichuan", "olmo", "smollm"), "llama"),
}
"""Families that differ from one of the two by what hardly takes time: the kind of position, of activation, of norm."""

_ENCODERS = frozenset({"bert", "roberta", "electra", "deberta", "xlmr", "encoder", "vit", "deit"})
"""Families of the GPT's layers whose every position sees all others; of images, patches in place of tokens."""

_TWO_STACKS = frozenset({"t5", "mt5", "bart", "pegasus", "ul2", "whisper", "marian", "nllb"})

_RECOMPUTE: Mapping[str, str] = {
    **dict.fromkeys(("", "none", "no", "off", "false", "0", "n/a", "disabled"), "none"),
    **dict.fromkeys(("selective", "attention", "core_attn", "sac", "op", "per_op"), "selective"),
    **dict.fromkeys(("full", "yes", "on", "true", "1", "uniform", "block", "layer", "all", "enabled"), "full"),
}
"""What tables call what runs again in backward: Megatron-LM's granularities and methods, torchtitan's modes."""

_FLASH = r"flash|sdpa|fused|cudnn|triton|xformers|memory.?efficient|splash"
_UNFUSED = r"^(unfused|no|none|eager|math|plain|standard|core|local)$"

_SHARDED = (
    (r"hybrid_shard_zero2|shard_grad_op|zero2", 2),
    (r"full_shard|hybrid_shard|fsdp2?|hsdp|zero3", 3),
    (r"zero1", 1),
    (r"no_shard|none|no|ddp|zero0", 0),
)
"""What frameworks call a stage of ZeRO: torch's `ShardingStrategy`, DeepSpeed's stages."""

_HYBRID = r"hybrid|hsdp"
"""What names of sharding in a node, with replicas across, contain: torch's `HYBRID_SHARD`."""

_NEUTRAL = frozenset({"", "0", "1", "no", "none", "n/a", "false"})
"""Texts of cells that say of a degree, or of something that is on or off, that there is none."""

_NVLINK_GB_PER_S = 100.0
"""Bandwidth a device and direction from which links are NVLink: PCIe 5 with 16 lanes has 64."""

_SIZES = ("", "80gb", "32gb", "96gb", "94gb")
"""Memories of boards that texts leave out, the one to be taken first."""


def text_of(row: Cells, column: str) -> str:
    """Return a cell's text. Raises `CostModelError` where it is missing."""
    found = (row.get(column) or "").strip()
    if not found:
        raise CostModelError(f"{column} is missing")
    return found


def choice_of(row: Cells, column: str, known: tuple[str, ...]) -> str:
    """Return a cell's text in small letters, one of those known. Raises `CostModelError` of others."""
    found = text_of(row, column).lower()
    if found not in known:
        raise CostModelError(f"{column} is {found!r}, not one of {', '.join(known)}")
    return found


def is_yes(text: str) -> bool:
    """Return whether a text says yes."""
    return text.strip().lower() in _YES


def answer_of(row: Cells, column: str) -> bool:
    """Return whether a cell says yes; one that says nothing says no. Raises `CostModelError` of other texts."""
    return bool((row.get(column) or "").strip()) and choice_of(row, column, (*_YES, *_NO)) in _YES


def number_of(row: Cells, column: str) -> float:
    """Return a cell's number of at least 0. Raises `CostModelError` of others."""
    try:
        value = float(text_of(row, column))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CostModelError(f"{column} is {row[column]!r}, not a number of at least 0")
    return value


def rate_of(row: Cells, column: str) -> float:
    """Return a cell's number, 0 where it says none."""
    return number_of(row, column) if (row.get(column) or "").strip() else 0.0


def positive_of(row: Cells, column: str) -> float:
    """Return a cell's number above 0. Raises `CostModelError` of others."""
    value = number_of(row, column)
    if not value:
        raise CostModelError(f"{column} is {row[column]!r}, not a number above 0")
    return value


def count_of(row: Cells, column: str) -> int:
    """Return a cell's whole number above 0. Raises `CostModelError` of others."""
    value = positive_of(row, column)
    if value != int(value):
        raise CostModelError(f"{column} is {row[column]!r}, not a whole number")
    return int(value)


def peak_bytes_of(row: Cells) -> float | None:
    """Return the measured peak memory in bytes; None where a row has none."""
    said = (row.get("measured_peak_gib") or "").strip()
    return positive_of(row, "measured_peak_gib") * 2**30 if said else None


def precision_of(row: Cells) -> tuple[str, str]:
    """Return the type of mixed precision, by torch's name or the short one, and a narrower one of products, if any.

    fp8 is mixed precision in bf16 whose linear layers compute in fp8.
    """
    said = text_of(row, "precision").lower()
    if _NARROW.fullmatch(said):
        return "bf16", "fp8"
    name = said.removeprefix("amp_").removesuffix("-mixed").removesuffix("_mixed")
    name = _TYPE_NAMES.get(name, name)
    if name not in _PRECISIONS:
        raise CostModelError(f"precision is {said!r}, not one of {', '.join(_PRECISIONS)}, fp8")
    return name, ""


def recompute_of(row: Cells) -> str:
    """Return what runs again in backward: `none`, `selective` or `full`; a cell that says nothing says none."""
    said = (row.get("recompute") or "").strip().lower()
    plain = re.sub(r"^(full|selective)[ _/:(-].*$", r"\1", said)
    if plain not in _RECOMPUTE:
        raise CostModelError(f"recompute is {said!r}, not one of none, selective, full")
    return _RECOMPUTE[plain]


def is_encoder(row: Cells) -> bool:
    """Return whether a row's family is one whose every position sees all others."""
    return _plain(text_of(row, "family")) in _ENCODERS


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def family_of(row: Cells) -> tuple[str, str]:
    """Return `gpt` or `llama`, and what was assumed of another name; empty: nothing."""
    said = text_of(row, "family")
    plain = _plain(said)
    if plain in {"gpt", "llama"}:
        return plain, ""
    if plain in _ENCODERS:
        return "gpt", f"family {said!r} is priced as gpt without a causal mask, its head on all positions"
    if plain in _TWO_STACKS:
        raise CostModelError(
            f"family is {said!r}, of an encoder and a decoder, and the columns say the sizes of one:"
            " `autopar plan` prices such models from their code"
        )
    if plain not in _KIN:
        raise CostModelError(
            f"family is {said!r}, not one of gpt, llama, bert: a table's columns say no more than their sizes;"
            " `autopar plan` prices other models from their code"
        )
    return _KIN[plain], f"family {said!r} is priced as {_KIN[plain]}"


def fuses_attention(row: Cells) -> bool:
    """Return whether scores of attention stay inside one kernel."""
    said = text_of(row, "attention").lower()
    if re.search(_UNFUSED, said):
        return False
    if re.search(_FLASH, said):
        return True
    raise CostModelError(f"attention is {said!r}, not one of flash, unfused")


def zero_stage_of(row: Cells) -> int:
    """Return the stage of ZeRO by its number or a framework's name."""
    said = (row.get("zero") or "").strip().lower()
    plain = re.sub(r"stage|[ -]", "", said)
    if plain in {"0", "1", "2", "3"}:
        return int(plain)
    for pattern, stage in _SHARDED:
        if re.fullmatch(pattern, plain):
            return stage
    found = f"is {said!r}" if said else "is missing"
    raise CostModelError(f"zero {found}: 0 for nothing sharded, 1 the optimizer, 2 gradients too, 3 parameters too")


def shard_group_of(row: Cells, ranks: int, in_node: int) -> int:
    """Return over how many of the data-parallel ranks state is sharded, if it is: `dp_shard`, else all of them.

    Of those whose `zero` is a name of hybrid sharding, the `in_node` ranks of a node, where there are more than one.
    """
    said = (row.get("dp_shard") or "").strip()
    is_hybrid = re.search(_HYBRID, (row.get("zero") or "").lower()) is not None
    group = count_of(row, "dp_shard") if said else min(ranks, max(in_node, 1)) if is_hybrid else ranks
    if ranks % group:
        told = f"dp_shard is {group}" if said else f"zero is {row['zero']!r}, {group} ranks in a node"
        raise CostModelError(f"{told}, and there are {ranks} data-parallel ranks: not a multiple")
    return group


def has_degree(row: Cells, column: str) -> bool:
    """Return whether an optional cell says something: none, 0 and 1 say nothing."""
    return (row.get(column) or "").strip().lower() not in _NEUTRAL


def degree_of(row: Cells, column: str) -> int:
    """Return the degree of an optional cell; 1 where it says nothing."""
    return count_of(row, column) if has_degree(row, column) else 1


_DESCRIBED = ("peak_TFLOP_per_s", "memory_GiB", "memory_GB_per_s")
"""Columns that together describe a device: its dense rate in the row's precision, the size and rate of its memory."""


def described_device(row: Cells) -> DeviceSpec | None:
    """Return the device that a row describes by its figures; None where it says none.

    Efficiencies are those of the catalogue's device of the same figures, else an A100's, as in a cluster file. Where
    the rate is that of fp8, bf16's is half of it.

    Raises:
        CostModelError: some of the figures are missing, or the rate is that of sparse products.
    """
    if not any((row.get(column) or "").strip() for column in _DESCRIBED):
        return None
    peak, size, rate = (positive_of(row, column) for column in _DESCRIBED)
    precision, narrow = precision_of(row)
    compute = {narrow: f"{peak}TFLOP/s", precision: f"{peak / 2}TFLOP/s"} if narrow else {precision: f"{peak}TFLOP/s"}
    document = {
        "memory": {"capacity": f"{size}GiB", "bandwidth": f"{rate}GB/s"},
        "compute": compute,
    }
    return read_device(text_of(row, "device"), Section.of(document, "the row's columns"))


def device_of(row: Cells, link_gb_per_s: float) -> tuple[str, str]:
    """Return the catalogue's name of a row's device, and what was assumed of it; empty: nothing.

    A text that leaves out how the device is built in is of the board that has the row's links: NVLink from 100 GB/s a
    device on, or where the row does not say. One that leaves out its memory is of the first in `_SIZES`.

    Raises:
        CostModelError: the catalogue has no such device.
    """
    said = text_of(row, "device")
    board = "pcie" if 0 < link_gb_per_s < _NVLINK_GB_PER_S else "sxm"
    for more in ("", *(f" {built} {size}" for built in (board, "") for size in _SIZES)):
        try:
            name = catalogued_name(said + more)
        except ClusterError:
            continue
        return name, "" if not more.strip() else f"device {said!r} is taken to be {name}"
    near = suggestion(said.lower(), catalog.names("devices"))
    raise CostModelError(
        f"device {said!r} is not in the catalogue{near}: `autopar cluster list` names what is, and columns "
        f"{', '.join(_DESCRIBED)} describe what is not"
    )
