"""Options of `plan`: text and Python values read alike; what is wrong is told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.ir.placement import Replicate, Shard
from autopar.options import FIX_KEYS, Constraint, PlanOptions


def test_nothing_given_is_the_contracts_defaults():
    options = PlanOptions.parse()

    assert options == PlanOptions.parse(batch=None, fix=None, strict=None)
    assert (options.memory_margin, options.time_limit, options.gap, options.seed, options.top_k) == (
        0.1,
        60,
        0.01,
        0,
        5,
    )


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ({"batch": "128"}, {"batch": 128}),
        ({"fix": ["tp=8", "pp=1"]}, {"fix": {"tp": 8, "pp": 1}}),
        ({"fix": "tp=8,pp=1"}, {"fix": {"tp": 8, "pp": 1}}),
        ({"fix": ["schedule=1f1b, pp=2", "tp=8"]}, {"fix": {"schedule": "1f1b", "pp": 2, "tp": 8}}),
        ({"forbid": "tp,pp"}, {"forbid": ["pp", "tp"]}),
        ({"fix": "sequence-parallel=on"}, {"fix": {"sequence_parallel": True}}),
        ({"fix": ["tp=8", "tp=8"]}, {"fix": {"tp": 8}}),
        ({"fix": "zero=0"}, {"fix": {"zero": 0}}),
        ({"fix": "schedule=1F1B"}, {"fix": {"schedule": "1f1b"}}),
        ({"fix": "recompute=full"}, {"fix": {"recompute": "full"}}),
        ({"forbid": ["tp", "pp"]}, {"forbid": ("pp", "tp", "tp")}),
        ({"forbid": "pp"}, {"forbid": ["pp"]}),
        ({"memory_margin": "10%"}, {"memory_margin": 0.1}),
        ({"gap": "1%"}, {"gap": 0.01}),
        ({"time_limit": "90s"}, {"time_limit": 90}),
        ({"precision": "BF16"}, {"precision": "bf16"}),
        ({"optimizer": "none"}, {"optimizer": "none"}),
        ({"set": ["n=4", "x=0.5", "tied=true", "act=gelu", "sizes=[1, 2]"]},
         {"set": {"n": 4, "x": 0.5, "tied": True, "act": "gelu", "sizes": [1, 2]}}),
        ({"constraint": "a.*.weight = Shard(0) @tp"}, {"constraint": [Constraint("a.*.weight", Shard(0), "tp")]}),
        ({"constraint": ["w=R@ep", "w=S1@tp"]},
         {"constraint": (Constraint("w", Replicate(), "ep"), Constraint("w", Shard(1), "tp"))}),
    ],
)  # fmt: skip
def test_text_and_python_values_read_alike(text: dict[str, Any], python: dict[str, Any]):
    assert PlanOptions.parse(**text) == PlanOptions.parse(**python)


def test_the_order_of_wishes_does_not_matter():
    first, second = PlanOptions.parse(fix=["tp=2", "pp=1"]), PlanOptions.parse(fix=["pp=1", "tp=2"])

    assert list(first.fix.items()) == list(second.fix.items())


def test_a_constraint_reads_back_from_its_text():
    (constraint,) = PlanOptions.parse(constraint="lm_head.weight=Shard(0)@tp").constraint

    assert PlanOptions.parse(constraint=str(constraint)).constraint == (constraint,)


def test_the_plan_records_what_was_demanded():
    options = PlanOptions.parse(fix="tp=4", forbid="pp", constraint="w=Shard(0)@tp", memory_margin="20%")

    assert options.constraints == {
        "memory_margin": 0.2, "fix": {"tp": 4}, "forbid": ["pp"], "constraint": ["w=Shard(0)@tp"],
    }  # fmt: skip


KEYS = ", ".join(FIX_KEYS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presicion": "bf16"}, "unknown option 'presicion' (did you mean 'precision'?); options are batch, seq, "),
        ({"fix": "tq=8"}, f"--fix tq: unknown key 'tq' (did you mean 'tp'?); keys are {KEYS}"),
        ({"fix": "sequence_paralel=1"}, "(did you mean 'sequence_parallel'?)"),
        ({"fix": "tp"}, "--fix tp: must be KEY=VALUE, such as tp=8"),
        ({"fix": "tp="}, "--fix tp=: must be KEY=VALUE"),
        ({"fix": "tp=0"}, "--fix tp=0: must be a whole number of at least 1"),
        ({"fix": {"tp": 2.5}}, "--fix tp=2.5: must be a whole number of at least 1"),
        ({"fix": {"tp": True}}, "--fix tp=True: must be a whole number of at least 1"),
        ({"fix": "zero=4"}, "--fix zero=4: must be 0, 1, 2 or 3"),
        ({"fix": "schedule=1f2b"}, "--fix schedule=1f2b: must be one of none, gpipe, 1f1b, "),
        ({"fix": "sequence_parallel=maybe"}, "--fix sequence_parallel=maybe: must be on or off"),
        ({"fix": ["tp=2", "tp=4"]}, "--fix gives tp twice, as 2 and as 4; keep one of them"),
        ({"fix": 3}, "--fix 3: must be a text or a list of texts"),
        ({"fix": "tp=2", "forbid": "tp"}, "--fix tp=2 and --forbid tp contradict each other; keep one of them"),
        ({"fix": "recompute=full", "forbid": "recompute"}, "--fix recompute=full and --forbid recompute contradict"),
        ({"forbid": "microbatch"}, "--forbid microbatch: unknown key 'microbatch'"),
        ({"fix": {"interleave": 2, "pp": 1}}, "--fix interleave=2 needs pipeline stages, but --fix pp=1"),
        ({"fix": {"zero": 3, "dp_shard": 1}}, "would hold a copy of, but --fix dp_shard=1 leaves no"),
        ({"fix": "zero=1", "forbid": "dp_shard"}, "but --forbid dp_shard leaves no ranks to shard it over"),
        ({"fix": "zero=1,cp=1", "forbid": "dp_shard,ep"}, "or fix cp or ep above 1"),
        ({"batch": 10, "fix": "microbatch=4"}, "--batch 10 cannot be cut into micro-batches of 4"),
        ({"batch": 6, "fix": {"dp_shard": 4}}, "--batch 6 cannot be split over 4 data-parallel groups"),
        ({"batch": "many"}, "--batch many: must be a whole number of at least 1"),
        ({"batch": 0}, "--batch 0: must be a whole number of at least 1"),
        ({"seed": -1}, "--seed -1: must be a whole number of at least 0"),
        ({"memory_margin": "110%"}, "--memory-margin 110%: must be a share of at least 0 and below 1"),
        ({"time_limit": "soon"}, "--time-limit soon: must be seconds above 0"),
        ({"time_limit": "nan"}, "--time-limit nan: must be seconds above 0"),
        ({"precision": "fp8"}, "--precision fp8: must be one of fp32, bf16, fp16"),
        ({"optimizer": "sdg"}, "--optimizer sdg: must be one of sgd, adam, adamw, none (did you mean 'sgd'?)"),
        ({"set": "layers"}, "--set layers: must be KEY=VALUE, such as num_hidden_layers=4"),
        ({"constraint": "w"}, "--constraint 'w': does not read as a constraint; write PARAMETER=PLACEMENT@AXIS"),
        ({"constraint": "w=Shard(0)@tq"}, "'tq' is no mesh axis (did you mean 'tp'?)"),
        ({"constraint": "w=Slice(0)@tp"}, "'Slice(0)' is no placement; use Replicate(), Shard(DIM) or Partial(sum)"),
        ({"constraint": "w=Partial(sum)@tp"}, "a parameter cannot rest as Partial(sum); it is"),
        ({"constraint": ["w=S0@tp", "w=S1@tp"]}, "--constraint gives w on tp twice, as Shard(0) and as Shard(1)"),
        ({"constraint": "w=S0@tp", "forbid": "tp"}, "needs the axis tp, which --forbid tp rules out"),
        ({"constraint": "w=S0@tp", "fix": "tp=1"}, "needs the axis tp, which --fix tp=1 rules out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        PlanOptions.parse(**options)


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({"precision": "fp8"}, "must be one of fp32, bf16, fp16, auto"),
        ({"optimizer": "lion"}, "must be one of sgd, adam, adamw, none"),
        ({"optimizer": "sdg"}, "(did you mean 'sgd'?)"),
        ({"optimizer": "adm"}, "(did you mean 'adam'?)"),
        ({"precision": "fp61"}, "(did you mean 'fp16'?)"),
        ({"precision": "bf17"}, "(did you mean 'bf16'?)"),
    ],
)
def test_a_slip_is_told_of_and_another_name_is_not_taken_for_one(options: dict[str, Any], ending: str):
    with pytest.raises(UsageError) as caught:
        PlanOptions.parse(**options)

    assert str(caught.value).endswith(ending)
