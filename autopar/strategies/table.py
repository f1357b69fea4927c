"""The project's own rules, by operator; families live in one file each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch

from autopar.ir.rule import Rule
from autopar.ir.strategy import Strategy
from autopar.strategies import (
    attention,
    convolution,
    embedding,
    factories,
    indexing,
    loss,
    matmul,
    matrices,
    moe,
    norms,
    pointwise,
    pooling,
    random,
    recurrent,
    reductions,
    scans,
    slicing,
    softmax,
    views,
)
from autopar.strategies.call import Call, overload

RuleOf = Callable[[Call], Iterable[Strategy]]

_FAMILIES: tuple[Mapping[str, RuleOf | Rule], ...] = (
    attention.RULES,
    convolution.RULES,
    embedding.RULES,
    factories.RULES,
    indexing.RULES,
    loss.RULES,
    matmul.RULES,
    matrices.RULES,
    moe.RULES,
    norms.RULES,
    pointwise.RULES,
    pooling.RULES,
    random.RULES,
    recurrent.RULES,
    scans.RULES,
    reductions.RULES,
    slicing.RULES,
    softmax.RULES,
    views.RULES,
)


def _fixed(rule: Rule) -> RuleOf:
    return lambda call: call.by(rule)


RULES: Mapping[str, RuleOf] = {
    target: _fixed(rule) if isinstance(rule, Rule) else rule for family in _FAMILIES for target, rule in family.items()
}
"""Every operator that has a rule of its own. Others that torch tags as pointwise are pointwise, and others that draw
random numbers are run whole, from one seed on all ranks."""


@lru_cache(maxsize=4096)
def rule_of(target: str) -> RuleOf | None:
    """Return the rule of an operator, or `None` where this table has none."""
    if target in RULES:
        return RULES[target]
    op = overload(target)
    if op is None or op._schema.is_mutable:
        return None
    by_elements = torch.Tag.pointwise in op.tags
    if torch.Tag.nondeterministic_seeded in op.tags:
        return random.drawn if by_elements else random.alike
    return pointwise.pointwise if by_elements else None
