"""Cells of mixtures of experts and of latent attention: what a row says of them, and what a model's name says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.cells import Cells, count_of, degree_of, has_degree, said
from cost_models.errors import CostModelError

_EXPERTS = r"mixtral|dbrx|moe\b|\b\d+x\d+b|\ba\d+(\.\d+)?b\b"
"""What names of mixtures of experts contain: Mixtral-8x7B, Qwen3-30B-A3B."""

_MIXTURES = ((r"mixtral", (8, 2)), (r"dbrx", (16, 4)))
"""Experts, and how many of them take a token, of models whose `ffn_hidden` can but be that of an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The feed-forward of a model whose tokens each go to a few experts."""

    experts: int
    chosen: int
    """Experts that take a token."""

    ffn: int
    """Width of one expert."""

    shared_ffn: int = 0
    """Width of all experts together that every token goes to."""

    dense_layers: int = 0
    """The first layers, whose feed-forward is one of `dense_ffn`."""

    dense_ffn: int = 0
    groups: int = 1
    """Groups of experts, of which a token's are in `reached`."""

    reached: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention: sizes of the narrow vectors, and of the parts of a head."""

    q_rank: int
    """0: queries come of the input."""

    kv_rank: int
    plain: int
    rotated: int
    values: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What configurations say of a model that rows name."""

    latent: Latent
    mixture: Mixture
    shared: int
    """How many experts `shared_ffn` is of."""


def _known(
    q_rank: int,
    experts: int,
    chosen: int,
    ffn: int,
    shared: int,
    dense: tuple[int, int],
    groups: tuple[int, int] = (1, 1),
) -> _Known:
    latent = Latent(q_rank=q_rank, kv_rank=512, plain=128, rotated=64, values=128)
    layers, dense_ffn = dense
    mixture = Mixture(
        experts=experts,
        chosen=chosen,
        ffn=ffn,
        shared_ffn=shared * ffn,
        dense_layers=layers,
        dense_ffn=dense_ffn,
        groups=groups[0],
        reached=groups[1],
    )
    return _Known(latent, mixture, shared)


_BY_NAME: tuple[tuple[str, _Known], ...] = (
    (r"deepseek.?v?2.?lite", _known(0, 64, 6, 1408, 2, (1, 10944))),
    (r"deepseek.?(coder.?)?v2", _known(1536, 160, 6, 1536, 2, (1, 12288), (8, 3))),
    (r"deepseek.?(v3|r1)|\bdsv3", _known(1536, 256, 8, 2048, 1, (3, 18432), (8, 4))),
    (r"moonlight", _known(0, 64, 6, 1408, 2, (1, 11264))),
    (r"kimi.?k2", _known(1536, 384, 8, 2048, 1, (1, 18432))),
)
"""Of models with latent attention, by what their names contain: `config.json` of each on https://huggingface.co."""

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _by_name(row: Cells) -> _Known | None:
    name = row.get("model") or ""
    return next((known for pattern, known in _BY_NAME if re.search(pattern, name, re.IGNORECASE)), None)


def latent_of(row: Cells, family: str) -> tuple[Latent | None, str]:
    """Return a row's latent attention, and what was assumed of it; None: it has none.

    Raises:
        CostModelError: columns say a part of it, or the family has none.
    """
    known = _by_name(row)
    found = [column for column in ("kv_lora_rank", *_LATENT) if has_degree(row, column)]
    if not found:
        if known is None or not re.search("deepseek|moonlight|kimi|llama", row["family"], re.IGNORECASE):
            return None, ""
        return known.latent, f"kv_lora_rank is missing: {known.latent.kv_rank} and its kin, by the model's name"
    if family != "llama":
        raise CostModelError(f"family is {family!r}: latent attention is priced of the llama family alone")
    if len(found) <= len(_LATENT):
        missing = [column for column in ("kv_lora_rank", *_LATENT) if column not in found]
        raise CostModelError(f"{found[0]} is {row[found[0]]}, of latent attention: add {', '.join(missing)}")
    plain, rotated, values = (count_of(row, column) for column in _LATENT)
    q_rank = count_of(row, "q_lora_rank") if has_degree(row, "q_lora_rank") else 0
    return Latent(q_rank=q_rank, kv_rank=count_of(row, "kv_lora_rank"), plain=plain, rotated=rotated, values=values), ""


def mixture_of(row: Cells, family: str) -> tuple[Mixture | None, str]:
    """Return a row's mixture of experts, and what was assumed of it; None: it has none.

    Raises:
        CostModelError: the row does not say which experts, or the family has none.
    """
    model = row.get("model") or ""
    known = _by_name(row)
    told = next((each for each in ("experts", "num_experts") if has_degree(row, each)), "")
    if not told and known is None and not re.search(_EXPERTS, model, re.IGNORECASE):
        for column in ("first_k_dense", "n_shared_experts", "moe_ffn_hidden"):
            if has_degree(row, column):
                raise CostModelError(
                    f"{column} is {row[column]}, and the row says of no experts: add experts and top_k"
                )
        return None, ""
    if family != "llama":
        raise CostModelError(f"family is {family!r}: mixtures of experts are priced of the llama family alone")
    ffn, dense_ffn = _widths(row, known)
    layers, shared = _first_and_shared(row, known, ffn)
    groups, reached = (known.mixture.groups, known.mixture.reached) if known is not None else (1, 1)
    groups = count_of(row, "n_group") if said(row, "n_group") else groups
    reached = count_of(row, "topk_group") if said(row, "topk_group") else min(reached, groups)
    more = {"ffn": ffn, "shared_ffn": shared, "dense_layers": layers, "dense_ffn": dense_ffn}
    more |= {"groups": groups, "reached": reached}
    if layers and not dense_ffn:
        raise CostModelError(
            f"first_k_dense is {layers}: add moe_ffn_hidden, the width of one expert; ffn_hidden is then that of the"
            " dense layers"
        )
    number = (known.mixture.experts, known.mixture.chosen) if known is not None else _few(model, told)
    if told:
        experts = count_of(row, told)
        if said(row, "top_k") or experts != number[0]:
            return Mixture(experts=experts, chosen=count_of(row, "top_k"), **more), ""
        return Mixture(experts=experts, chosen=number[1], **more), f"top_k is missing: {number[1]}, by the model's name"
    what = f"experts is missing: {number[0]}, of which {number[1]} take a token, by the model's name"
    return Mixture(experts=number[0], chosen=number[1], **more), what


def _few(model: str, told: str) -> tuple[int, int]:
    """Return experts, and how many take a token, of a model that has but one feed-forward's width.

    Of one whose name does not say, none: the row has to, as it has where a column has `told` of experts.
    """
    found = next((sizes for pattern, sizes in _MIXTURES if re.search(pattern, model, re.IGNORECASE)), (0, 0))
    if found == (0, 0) and not told:
        raise CostModelError(
            f"model is {model!r}, a mixture of experts by its name: add columns experts and top_k, with ffn_hidden that"
            " of one expert"
        )
    return found


def _widths(row: Cells, known: _Known | None) -> tuple[int, int]:
    """Return the widths of an expert and of the dense layers' feed-forward, 0: the row says no such.

    Of a model that is known `ffn_hidden` may be either.
    """
    width = count_of(row, "ffn_hidden")
    if has_degree(row, "moe_ffn_hidden"):
        return count_of(row, "moe_ffn_hidden"), width
    if known is None:
        return width, 0
    return known.mixture.ffn if width == known.mixture.dense_ffn else width, known.mixture.dense_ffn


def _first_and_shared(row: Cells, known: _Known | None, ffn: int) -> tuple[int, int]:
    """Return the layers that come first without experts, and the width of the experts that all tokens go to."""
    layers = known.mixture.dense_layers if known is not None else 0
    if said(row, "first_k_dense"):
        layers = degree_of(row, "first_k_dense") if _is_one_or_more(row, "first_k_dense") else 0
    if has_degree(row, "shared_ffn_hidden"):
        return layers, count_of(row, "shared_ffn_hidden")
    shared = known.shared if known is not None else 0
    if said(row, "n_shared_experts"):
        shared = degree_of(row, "n_shared_experts") if _is_one_or_more(row, "n_shared_experts") else 0
    return layers, shared * ffn


def further_of(row: Cells) -> int:
    """Return the layers that predict further tokens (multi-token prediction); 0 where the row says none."""
    return degree_of(row, "mtp_layers") if _is_one_or_more(row, "mtp_layers") else 0


_NO = ("0", "0.0", "no", "false", "off")


def _is_one_or_more(row: Mapping[str, str], column: str) -> bool:
    return bool(said(row, column)) and said(row, column).lower() not in _NO
