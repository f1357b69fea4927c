"""Machines that have the kernels of libraries capture the same program, though these need values to run."""

from __future__ import annotations

import subprocess
import sys

import pytest

KERNELS = {
    "mamba": ["causal_conv1d_fn", "selective_scan_fn"],
    "mamba2": ["causal_conv1d_fn", "mamba_chunk_scan_combined"],
    "qwen3_next": ["causal_conv1d_fn", "chunk_gated_delta_rule"],
}

_COMPARED = """
import sys
from tests.support import kernels
kernels.install()  # before transformers looks for them
import torch
from autopar.capture import capture
from benchmarks.architectures import build
from tests.capture.program import run

torch.manual_seed(0)
model, inputs = build(sys.argv[1])
captured = capture(model, inputs)
scans = [op.target for op in captured.graph.ops if op.target == "autopar_ops.scan.default"]
kernels.USED.clear()
found = run(captured, model, (), inputs)
used = sorted(set(kernels.USED))
expected = model(**inputs)
expected = expected if isinstance(expected, torch.Tensor) else expected["loss"]
expected.backward()
torch.testing.assert_close(found.result if isinstance(found.result, torch.Tensor) else found.result["loss"], expected)
for name, parameter in model.named_parameters():
    torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
print(len(scans), *used)
"""


@pytest.mark.parametrize(
    "name", [each if each == "mamba2" else pytest.param(each, marks=pytest.mark.slow) for each in KERNELS]
)
def test_programs_run_the_kernels_that_are_there(name: str) -> None:
    case = {"mamba": "hf:mamba", "qwen3_next": "hf:qwen3_next"}.get(name, name)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COMPARED, case],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    count, *used = ended.stdout.split()
    assert int(count) >= 4
    assert used == [each for each in KERNELS[name] if each != "mamba_inner_fn"]
