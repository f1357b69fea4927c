"""Texts of the runtime's errors."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Axis, Mesh
from autopar.ir.tensor import TensorMeta
from autopar.runtime import errors

CASES = {
    "world size": (
        errors.world_size_differs(4, 2, str(Mesh((Axis("dp", 2), Axis("tp", 2))))),
        "the plan is for 4 ranks (dp=2 x tp=2) and 2 are running; start it with torchrun --nproc-per-node or --nnodes "
        "so that 4 run, or plan again for 2",
    ),
    "one rank": (
        errors.world_size_differs(4, 1, "tp=4"),
        "the plan is for 4 ranks (tp=4) and 1 is running; start it with torchrun --nproc-per-node or --nnodes "
        "so that 4 run, or plan again for 1",
    ),
    "disagree": (
        errors.ranks_disagree("captured program", ["aaaa", "bbbb", "aaaa"]),
        "ranks disagree about the captured program: 2 different ones among 3 ranks\n"
        "    ranks 0, 2: aaaa\n    ranks 1: bbbb\n"
        "all ranks have stopped; give every rank the same model, example inputs, options and torch",
    ),
    "failed": (
        errors.rank_failed([(1, "no such file\nsecond line")], "capture the model"),
        "1 other rank failed to capture the model; this rank stops too\n    rank 1: no such file",
    ),
    "uninitialised": (
        errors.uninitialised(["a.weight", "a.bias", "b.weight", "b.bias"]),
        "4 parameters or buffers are on meta and have no values: a.weight, a.bias, b.weight and 1 more\n"
        "pass init_fn=FUNCTION, which is called with each module that owns such tensors once they are allocated, "
        "or build the model with real values",
    ),
    "input": (
        errors.input_differs("ids", TensorMeta((8, 16), "int64"), (4, 16), TensorMeta((3, 16), "int64")),
        "argument ids is int64[3, 16], and the plan was made for int64[4, 16] (this rank's part of int64[8, 16])\n"
        "bring inputs of the planned shapes (drop_last=True, for a last batch that is smaller), or plan again with "
        "example_inputs of this form",
    ),
    "input of another width": (
        errors.input_differs("x", TensorMeta((8, 16), "float32"), (8, 16), TensorMeta((8, 15), "float32")),
        "argument x is float32[8, 15], and the plan was made for float32[8, 16]\n"
        "bring inputs of the planned shapes, or plan again with example_inputs of this form",
    ),
    "input of another dtype": (
        errors.input_differs("x", TensorMeta((8, 16), "float32"), (8, 16), TensorMeta((8, 16), "float64")),
        "argument x is float64[8, 16], and the plan was made for float32[8, 16]\n"
        "bring it as float32 (.to(torch.float32)), or plan again with example_inputs of this form",
    ),
    "peer": (
        errors.message_lost(1, 2, "relu", "forward of stage 3, micro-batch 0", "timed out.\nmore", sending=False),
        "rank 1 (stage 2) did not send 'relu', needed for the forward of stage 3, micro-batch 0: timed out\n"
        "it has stopped, or is slower than the process group's timeout: see its own output. A longer timeout is given "
        "to torch.distributed.init_process_group(timeout=...)",
    ),
    "micro-batches": (
        errors.batch_not_divisible("ids", 6, 4),
        "argument ids has 6 rows, which do not make 4 equal micro-batches; use a batch size that is a multiple of 4, "
        "or plan again with another --fix microbatch=N",
    ),
    "no loss": (
        errors.no_single_loss(["logits"]),
        "several micro-batches need a model that returns its loss, one scalar, because their backward runs inside "
        "forward; gradients start at logits. Compute the loss inside forward, or plan with --fix microbatch=BATCH "
        "and --fix pp=1",
    ),
    "trained": (
        errors.unfrozen("head.weight"),
        "parameter head.weight requires a gradient now, and was frozen when the plan was made: the program computes "
        "none for it. Compile the model while everything that is ever trained requires a gradient, and freeze "
        "parameters of the compiled model afterwards: these may be frozen and unfrozen between steps",
    ),
    "unknown parameters": (
        errors.parameters_differ(["x.weight"]),
        "the plan says nothing about 1 parameters of the model: x.weight; plan again",
    ),
    "constants": (
        errors.constant_on_meta(["table"]),
        "the model keeps 1 tensors on meta as plain attributes, which have no values: table\n"
        "register them as buffers, or build the model with real values",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str):
    error, text = CASES[name]

    assert str(error) == text
