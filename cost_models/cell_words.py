"""Words in cells of a table of training steps: types, families, attention, recomputation, sharding, devices.

What frameworks and tables call them, to what is priced; an error names the column and what it may say.
"""

import re
from collections.abc import Mapping

from cost_models import catalog
from cost_models.cells import Cells, choice_of, count_of, number_of, positive_of, said, text_of
from cost_models.device import DeviceSpec
from cost_models.device_file import read_device
from cost_models.device_names import catalogued_name
from cost_models.errors import ClusterError, CostModelError, suggestion
from cost_models.section import Section

_TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "32": "fp32", "16": "fp16"}
_PRECISIONS = ("fp32", "bf16", "fp16")
_PURE = re.compile(r"^(pure|true)[_ -]|[_ -](true|pure)$")

_TF32 = ("tf32", "tensorfloat32", "fp32/tf32", "fp32 (tf32)")
"""What texts call float32 whose products compute in tf32."""

_NARROW = re.compile(
    r"(?:amp[_ ]?|bf16[-+_ /]*)?(?:mx)?(?:fp8|float8)(?:[-_ ]?(?:hybrid|e4m3|e5m2|ds|cs|mx|sc|blockwise|mixed))*"
)
"""What texts call mixed precision whose linear layers compute in fp8: by format, by scaling, by Composer's name."""

_KIN: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "gpt3", "gptj", "gptneo", "gptneox", "pythia", "opt", "bloom", "falcon", "mpt"), "gpt"),
    **dict.fromkeys(("nemotron", "starcoder", "starcoder2", "santacoder", "codegen", "phi", "phi2", "dolly"), "gpt"),
    **dict.fromkeys(("llama2", "llama3", "codellama", "mistral", "mixtral", "qwen", "qwen2", "qwen3", "yi"), "llama"),
    **dict.fromkeys(("phi3", "internlm", "internlm2", "baichuan", "olmo", "olmo2", "smollm", "aquila"), "llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "chatglm", "glm", "glm4", "granite", "stablelm", "moe"), "llama"),
    **dict.fromkeys(("dbrx", "grok", "gptoss", "qwenmoe", "qwen2moe", "qwen3moe", "minicpm", "tinyllama"), "llama"),
    **dict.fromkeys(("deepseek", "deepseekv2", "deepseekv3", "deepseekmoe", "moonlight", "kimi", "kimik2"), "llama"),
}
"""Families that differ from one of the two by what hardly takes time: the kind of position, of activation, of norm."""

_ENCODERS = frozenset({"bert", "roberta", "electra", "deberta", "xlmr", "encoder", "vit", "deit"})
"""Families of the GPT's layers whose every position sees all others; of images, patches in place of tokens."""

_OF_IMAGES = frozenset({"vit", "deit"})
"""Encoders that are trained without dropout: `drop_rate` and `attn_drop_rate` of timm and of DeiT's recipes are 0."""

_TWO_STACKS = frozenset({"t5", "mt5", "bart", "pegasus", "ul2", "whisper", "marian", "nllb"})

_NONE = ("", "none", "no", "off", "false", "0", "n/a", "na", "-", "null", "disabled", "everything_saveable", "save_all")
_SELECTIVE = ("selective", "attention", "attn", "sac", "op", "per_op", "core", "core_attn", "core_attention")
_SELECTIVE_TOO = ("recompute_attn", "selective_op", "attention_core")
_FULL = ("full", "yes", "on", "true", "1", "uniform", "layer", "layers", "all", "enabled", "block", "whole", "ac")
_FULL_TOO = ("checkpoint", "checkpointing", "gradient_checkpointing", "activation_checkpointing", "nothing_saveable")
_RECOMPUTE: Mapping[str, str] = {
    **dict.fromkeys(_NONE, "none"),
    **dict.fromkeys((*_SELECTIVE, *_SELECTIVE_TOO), "selective"),
    **dict.fromkeys((*_FULL, *_FULL_TOO), "full"),
}
"""What tables call what runs again in backward: Megatron-LM's granularities and methods, torchtitan's modes, JAX's."""

_PARTLY = re.compile(r"partial|every.*|some|\d+%|(block|layers?|full)[ _:=-]*\d+|\d+ layers?|[2-9]|\d\d+|.*\d+/\d+.*")
"""What tables say where some layers alone are recomputed."""

_FLASH = (
    r"flash|sdpa|fused|cudnn|triton|xformers|memory.?efficient|splash|\bflex|transformer.?engine|\bte\b|\bfa ?[234]?\b"
)
_RINGS = r"ring|ulysses|striped|context.?parallel"
"""Ways in which ranks share attention, whose kernels are fused ones."""

_UNFUSED = r"^(unfused|no|none|eager|math|plain|standard|core|local|naive|dot_product|vanilla)$"
_FLASH_FROM = 2023
"""Year from which attention is fused where a row does not say: FlashAttention's first whole year in frameworks."""

_SHARDED = (
    (r"_?hybrid_shard_zero2|shard_grad_op|(zero_?|z|os\+?)2|os\+g|sdp2", 2),
    (r"full_shard|_?hybrid_shard|(megatron)?_?fsdp[12]?|hsdp|(zero_?|z)3|os\+g\+p|p_g_os", 3),
    (r"(zero_?|z)1|os|dist(ributed)?_?opt(im(izer)?)?|sharded_?optimizer|optimizer|optim", 1),
    (r"no_shard|none|no|off|false|ddp|dp|(zero_?|z)0|n/a|na", 0),
)
"""What frameworks call a stage of ZeRO: torch's `ShardingStrategy`, DeepSpeed's stages, Megatron's flag."""

_HYBRID = r"hybrid|hsdp"
"""What names of sharding in a node, with replicas across, contain: torch's `HYBRID_SHARD`."""

_NVLINK_GB_PER_S = 100.0
"""Bandwidth a device and direction from which links are NVLink: PCIe 5 with 16 lanes has 64."""

_SIZES = ("", "80gb", "32gb", "96gb", "94gb")
"""Memories of boards that texts leave out, the one to be taken first."""


def precision_of(row: Cells) -> tuple[str, str]:
    """Return the type of mixed precision, by torch's name or the short one, and a narrower one of products, if any.

    fp8 is mixed precision in bf16 whose linear layers compute in fp8; tf32 is float32 whose products compute in it.
    """
    text = text_of(row, "precision").lower()
    if _NARROW.fullmatch(_PURE.sub("", text)):
        return "bf16", "fp8"
    if text in _TF32:
        return "fp32", "tf32"
    name = re.sub(r"^(amp|mixed|pure|true)[_ -]|[_ -](\(?(mixed|amp|autocast)( precision)?\)?|true|pure)$", "", text)
    name = _TYPE_NAMES.get(name, name)
    if name not in _PRECISIONS:
        of_mixed = ": mixed with which of them?" if name in {"amp", "mixed", "mixed precision", "o1", "o2"} else ""
        raise CostModelError(f"precision is {text!r}, not one of {', '.join(_PRECISIONS)}, tf32, fp8{of_mixed}")
    return name, ""


def is_pure(row: Cells) -> bool:
    """Return whether parameters are of 16 bits and so is what the optimizer keeps of them: `bf16-true`, `pure_bf16`."""
    return _PURE.search(text_of(row, "precision").lower()) is not None


def recompute_of(row: Cells) -> str:
    """Return what runs again in backward: `none`, `selective` or `full`; a cell that says nothing says none.

    Raises `CostModelError` of other texts, and of those that say that some layers are recomputed and others not.
    """
    text = (row.get("recompute") or "").strip().lower()
    if text in {"uniform:1", "full/uniform/1"}:
        return "full"
    if _PARTLY.fullmatch(text) and text not in _RECOMPUTE:
        raise CostModelError(f"recompute is {text!r}: that some layers are recomputed and others not is not priced")
    text = re.sub(r"^(?:gradient|activation)s?[ _-]?checkpoint(?:ing)?[ :_(-]+(full|selective)\)?$", r"\1", text)
    plain = re.sub(r"^(full|selective)[ _/:(-].*$", r"\1", text)
    known = _RECOMPUTE.get(plain, _RECOMPUTE.get(re.sub(r"[ -]", "_", plain)))
    if known is None:
        raise CostModelError(f"recompute is {text!r}, not one of none, selective, full")
    return known


def is_encoder(row: Cells) -> bool:
    """Return whether a row's family is one whose every position sees all others."""
    return _plain(text_of(row, "family")) in _ENCODERS


def drops(row: Cells, *, fused: bool) -> bool:
    """Return whether a row's model was trained with dropout: as said, else as most of its family are.

    Those of images have none, and others no more since their attention is fused.
    """
    if (row.get("dropout") or "").strip().lower() in {"none", "no", "off", "false"}:
        return False
    if said(row, "dropout"):
        return number_of(row, "dropout") > 0
    return not fused and _plain(text_of(row, "family")) not in _OF_IMAGES


def _plain(text: str) -> str:
    """Return a family's name by its letters and its version before the point: `Qwen2.5` is `qwen2`."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\.\d+", r"\1", text.lower()))


def family_of(row: Cells) -> tuple[str, str]:
    """Return `gpt`, `llama` or `seq2seq`, and what was assumed of another name; empty: nothing."""
    text = text_of(row, "family")
    plain = _plain(text)
    if plain in {"gpt", "llama", "seq2seq"}:
        return plain, ""
    if plain in _ENCODERS:
        return "gpt", f"family {text!r} is priced as gpt without a causal mask, its head on all positions"
    if plain in _TWO_STACKS:
        return "seq2seq", f"family {text!r} is priced as an encoder and a decoder with learned positions"
    if plain not in _KIN:
        raise CostModelError(
            f"family is {text!r}, not one of gpt, llama, bert, t5: a table's columns say no more than their sizes;"
            " `autopar plan` prices other models from their code"
        )
    return _KIN[plain], f"family {text!r} is priced as {_KIN[plain]}"


def fuses_attention(row: Cells) -> tuple[bool, str]:
    """Return whether scores of attention stay inside one kernel, and what was assumed of it; empty: nothing."""
    text = said(row, "attention").lower()
    if not text and (row.get("attention") or "").strip().lower() not in {"no", "none"}:
        fused = count_of(row, "year") >= _FLASH_FROM
        return fused, f"attention is missing: {'flash' if fused else 'unfused'}, as most software of that year"
    if not text or re.search(_UNFUSED, text):
        return False, ""
    if re.search(f"{_FLASH}|{_RINGS}", text):
        return True, ""
    raise CostModelError(f"attention is {text!r}, not one of flash, unfused")


_GELUS = ("gelu", "gelu_tanh", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu")
_WRITTEN_OUT = ("gelu_new", "new_gelu", "newgelu")
_ACTIVATIONS = (*_GELUS, *_WRITTEN_OUT, "silu", "swiglu", "relu", "relu2", "squared_relu", "geglu")

_TRANSFORMERS = r"transformers|hugging|\bhf\b|accelerate|\btrl\b"
_OF_GELU_NEW = r"^(distil)?gpt-?2|^gpt-?(j|neo)\b"
"""What names of models begin with whose `config.json` asks for `gelu_new`."""


def fuses_gelu(row: Cells) -> bool:
    """Return whether GELU is one operator; `gelu_new` is transformers' and minGPT's, in the operators of its formula.

    Where a row does not say, transformers' GPT-2 and kin have that.

    Raises:
        CostModelError: the activation is not known.
    """
    if said(row, "activation"):
        return choice_of(row, "activation", _ACTIVATIONS) not in _WRITTEN_OUT
    by_transformers = re.search(_TRANSFORMERS, text_of(row, "framework").lower()) is not None
    return not (by_transformers and re.search(_OF_GELU_NEW, (row.get("model") or "").lower()))


def zero_stage_of(row: Cells) -> int:
    """Return the stage of ZeRO by its number or a framework's name."""
    text = (row.get("zero") or "").strip().lower()
    if "offload" in text:
        raise CostModelError(f"zero is {text!r}: state kept in the host's memory is not priced")
    plain = (
        re.sub(r"stage_?|deepspeed_?|[ -]|(?<=zero)_(?=[0-3])", "", text)
        .replace("zero_", "zero")
        .replace("__", "_")
        .removesuffix(".0")
    )
    if plain in {"0", "1", "2", "3"}:
        return int(plain)
    for pattern, stage in _SHARDED:
        if re.fullmatch(pattern, plain):
            return stage
    found = f"is {text!r}" if text else "is missing"
    raise CostModelError(f"zero {found}: 0 for nothing sharded, 1 the optimizer, 2 gradients too, 3 parameters too")


def shard_group_of(row: Cells, ranks: int, in_node: int) -> int:
    """Return over how many of the data-parallel ranks state is sharded, if it is: `dp_shard`, else all of them.

    Of those whose `zero` is a name of hybrid sharding, the `in_node` ranks of a node, where there are more than one.
    """
    is_hybrid = re.search(_HYBRID, (row.get("zero") or "").lower()) is not None
    told = said(row, "dp_shard")
    group = count_of(row, "dp_shard") if told else min(ranks, max(in_node, 1)) if is_hybrid else ranks
    if ranks % group:
        source = f"dp_shard is {group}" if told else f"zero is {row['zero']!r}, {group} ranks in a node"
        raise CostModelError(f"{source}, and there are {ranks} data-parallel ranks: not a multiple")
    return group


_COMPILED = ("torch.compile", "torch_compile", "inductor", "xla", "jit", "max-autotune", "full", "compiled")
_PARTLY_COMPILED = ("partial", "partly", "some", "per-layer", "layers", "blocks")


def is_compiled(row: Cells) -> bool:
    """Return whether a compiler made the kernels; a cell that says nothing says no.

    Layers alone are compiled as a rule, so that a text that says so says yes. Raises `CostModelError` of others.
    """
    text = said(row, "compiled").lower()
    if not text or text in {"no", "false", "0", "off", "n", "disabled", "eager"}:
        return False
    if text in {"yes", "true", "1", "on", "y", "x", "enabled", *_COMPILED, *_PARTLY_COMPILED}:
        return True
    raise CostModelError(f"compiled is {text!r}, not one of yes, no")


_DESCRIBED = ("peak_TFLOP_per_s", "memory_GiB", "memory_GB_per_s")
"""Columns that together describe a device: its dense rate in the row's precision, the size and rate of its memory."""


def described_device(row: Cells) -> DeviceSpec | None:
    """Return the device that a row describes by its figures; None where it says none.

    Efficiencies are those of the catalogue's device of the same figures, else an A100's, as in a cluster file. Where
    the rate is that of fp8, bf16's is half of it.

    Raises:
        CostModelError: some of the figures are missing, or the rate is that of sparse products.
    """
    if not any(said(row, column) for column in _DESCRIBED):
        return None
    if missing := [column for column in _DESCRIBED if not said(row, column)]:
        raise CostModelError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: a device is described by"
            f" {', '.join(_DESCRIBED)} together"
        )
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
    text = re.sub(r"^\d+ ?[x\u00d7*] ?", "", text_of(row, "device"))
    board = "pcie" if 0 < link_gb_per_s < _NVLINK_GB_PER_S else "sxm"
    for more in ("", *(f" {built} {size}" for built in (board, "") for size in _SIZES)):
        try:
            name = catalogued_name(text + more)
        except ClusterError:
            continue
        return name, "" if not more.strip() else f"device {text!r} is taken to be {name}"
    near = suggestion(text.lower(), catalog.names("devices"))
    raise CostModelError(
        f"device {text!r} is not in the catalogue{near}: `autopar cluster list` names what is, and columns "
        f"{', '.join(_DESCRIBED)} describe what is not"
    )
