"""What stands for an operator whose local form differs from the global one.

Called for an operator when the strategy of any mesh axis names a lowering; one
function serves all the names (`Site.axes`) that the operator's strategies use,
alone and together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import fx

from autopar.rewrite.lowerings import lookup, loss, moe, norms, random, shapes, softmax
from autopar.rewrite.site import Site

Lowering = Callable[[Site], fx.Node | tuple[fx.Node | None, ...]]

LOWERINGS: Mapping[str, Lowering] = {
    "aten.embedding.default": lookup.embedding,
    "aten.embedding_dense_backward.default": lookup.embedding_backward,
    "aten.index.Tensor": lookup.index,
    "aten._unsafe_index.Tensor": lookup.index,
    "aten.index_put.default": lookup.index_put,
    "aten._unsafe_index_put.default": lookup.index_put,
    "aten.gather.default": lookup.gather,
    "aten.index_select.default": lookup.index_select,
    "aten.index_add.default": lookup.index_add,
    "aten.scatter.src": lookup.scatter,
    "aten.scatter.value": lookup.scatter,
    "aten.scatter_add.default": lookup.scatter,
    "aten._softmax.default": softmax.softmax,
    "aten._log_softmax.default": softmax.log_softmax,
    "aten._softmax_backward_data.default": softmax.softmax_backward,
    "aten._log_softmax_backward_data.default": softmax.log_softmax_backward,
    "aten.nll_loss_forward.default": loss.nll_loss,
    "aten.nll_loss2d_forward.default": loss.nll_loss,
    "aten.nll_loss_backward.default": loss.nll_loss_backward,
    "aten.nll_loss2d_backward.default": loss.nll_loss_backward,
    "autopar_ops.cross_entropy_backward.default": loss.cross_entropy_backward,
    **{
        f"aten.{name}": loss.scaled
        for name in (
            "mean.default", "mean.dim", "mse_loss.default", "mse_loss_backward.default", "smooth_l1_loss.default",
            "smooth_l1_loss_backward.default", "huber_loss.default", "huber_loss_backward.default",
            "binary_cross_entropy.default", "binary_cross_entropy_backward.default",
            "binary_cross_entropy_with_logits.default", "soft_margin_loss.default", "soft_margin_loss_backward.default",
            "multi_margin_loss.default", "multi_margin_loss_backward.default",
            "multilabel_margin_loss_forward.default", "multilabel_margin_loss_backward.default",
        )
    },
    **{
        f"aten.{name}": loss.shared
        for name in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar")
    },
    "aten._native_batch_norm_legit_functional.default": norms.batch_norm,
    "aten._native_batch_norm_legit.no_stats": norms.batch_norm,
    "aten.native_batch_norm_backward.default": norms.batch_norm_backward,
    "aten._grouped_mm.default": moe.grouped_mm,
    "transformers.grouped_mm_fallback.default": moe.grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": moe.grouped_mm_backward,
    "aten.arange.default": shapes.part_of_range,
    "aten.arange.start": shapes.part_of_range,
    "aten.arange.start_step": shapes.part_of_range,
    "prims.iota.default": shapes.part_of_range,
    "aten.squeeze.default": shapes.squeeze,
    "aten.squeeze.dim": shapes.squeeze,
    "aten.squeeze.dims": shapes.squeeze,
    "aten.squeeze_copy.dim": shapes.squeeze,
}  # fmt: skip
"""The lowerings by operator, but for those of random operators: `lowering_of` gives these too."""


@lru_cache(maxsize=4096)
def lowering_of(target: str) -> Lowering:
    """Return the lowering of an operator.

    Raises:
        KeyError: it has none.
    """
    if target not in LOWERINGS and _draws(target):
        return random.drawn
    return LOWERINGS[target]


def lower(site: Site) -> fx.Node | tuple[fx.Node | None, ...]:
    """Emit what stands for the operator of a site, some of whose strategies name lowerings; return its outputs.

    Raises:
        KeyError: the operator has no lowering.
    """
    return lowering_of(site.op.target)(site)


def _draws(target: str) -> bool:
    space, packet, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, space, None), packet, None), overload, None)
    return found is not None and torch.Tag.nondeterministic_seeded in found.tags
