"""Which published rows ran under autocast, and with which activation, by their framework and their columns."""

from __future__ import annotations

import pytest

from cost_models.errors import CostModelError
from cost_models.training_rows import read_training_row
from tests.support.training_row import ROW

CASTING = [
    ({"framework": "pytorch ddp", "zero": "0"}, (True, True)),
    ({"framework": "nanogpt", "zero": "1"}, (True, True)),
    ({"framework": "pytorch", "zero": "3"}, (False, False)),
    ({"framework": "pytorch fsdp", "zero": "1"}, (False, False)),
    ({"framework": "tensorflow", "zero": "0"}, (True, True)),
    ({"framework": "lightning-fsdp", "zero": "3"}, (True, False)),
    ({"framework": "accelerate", "zero": "2"}, (True, False)),
    ({"framework": "transformers", "zero": "0", "precision": "bf16-true"}, (False, False)),
    ({"framework": "pytorch", "zero": "0", "precision": "tf32"}, (False, False)),
    ({"framework": "pytorch", "zero": "0", "autocast": "no"}, (False, False)),
    ({"framework": "pytorch fsdp", "zero": "3", "autocast": "yes"}, (True, False)),
    ({"framework": "deepspeed (lightning)", "zero": "3"}, (False, False)),
    ({"framework": "PyTorch with Apex", "zero": "0"}, (False, False)),
    ({"framework": "llm.c", "zero": "1"}, (False, False)),
    ({"framework": "megatron-lm", "zero": "0"}, (False, False)),
]


@pytest.mark.parametrize(("change", "wanted"), CASTING)
def test_mixed_precision_is_autocast_where_software_runs_under_it(change: dict[str, str], wanted: tuple[bool, bool]):
    stack = read_training_row({**ROW, **change}).stack

    assert (stack.autocasts, stack.float32_parameters) == wanted


GELUS = [
    ({"framework": "transformers", "model": "GPT-2-XL"}, False),
    ({"framework": "transformers", "model": "GPT-2-XL", "activation": "gelu"}, True),
    ({"framework": "lightning", "model": "GPT-2-XL", "activation": "gelu_new"}, False),
    ({"framework": "transformers", "model": "OPT-1.3B"}, True),
    ({"framework": "megatron-lm", "model": "GPT-2-XL"}, True),
]


@pytest.mark.parametrize(("change", "fused"), GELUS)
def test_gelu_is_written_out_where_software_or_the_row_has_it_so(change: dict[str, str], fused: bool):
    assert read_training_row({**ROW, **change}).architecture.fused_gelu is fused


def test_an_activation_that_is_not_known_names_what_is():
    with pytest.raises(CostModelError, match="activation is 'swish9', not one of gelu, "):
        read_training_row({**ROW, "activation": "swish9"})
