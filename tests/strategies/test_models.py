"""Every call that a step of a real model makes, in every strategy, on real parts against the whole."""

from __future__ import annotations

import pytest

from autopar.models.hf_tiny import SEQ, tiny, tiny_names
from autopar.strategies import axis_strategies
from autopar.strategies.random import LOWERING
from tests.strategies.one_op import check, mesh_of, on_mesh, sample
from tests.strategies.recorded import Signature, calls_of

COVERING = ("llama", "gpt2", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "whisper")
"""The architectures of the numerical tests; the rest belongs to the full matrix."""

STEPS = {"rwkv": 8}
"""Sequence of models that compute one position after another: a call of each position is a signature of its own."""

SEEN: set[Signature] = set()
"""Signatures that a model before made: each is run once."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COVERING else pytest.mark.slow) for name in sorted(tiny_names())],
)
def test_each_call_of_a_model_is_known_and_its_parts_make_the_whole(name: str) -> None:
    cases = calls_of(*tiny(name, seq=STEPS.get(name, SEQ)), SEEN)

    unknown = {case.target for case in cases if not axis_strategies(case.op, case.metas, 2, ()).known}
    assert not unknown
    for case in cases:
        strategies = case.strategies(2)
        if any(each.lowering == LOWERING for each in strategies):
            continue
        for each in strategies:
            alone = on_mesh(case, (each,), (2,))
            assert alone is not None
            check(case, alone, mesh_of((2,)))
        for both in sample(case, (2, 2), 2, seed=3):
            check(case, both, mesh_of((2, 2)))
