"""What a process frees stays with it, unless its user says otherwise: pages are counted, not seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autopar.runtime.heap import KEEP, keep_freed_memory

_FAULTS = """
import resource
from autopar.runtime.ranks import Ranks
import torch

Ranks.join("cpu")
def step():
    return sum(torch.ones(size * 2**18).sum() for size in (48, 8, 64, 16))
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def anew():
    before = pages()
    step()
    return pages() - before
print(min(anew() for _ in range(12)))
"""
"""Prints the fewest pages that a step of a dozen gets anew, of tensors of 8 to 64 MiB: the first ones make the heap."""


def _faults(**variables: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(ended.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="pages and glibc are Linux's")
def test_a_step_gets_its_memory_from_those_before_unless_the_user_says_no():
    kept, left = _faults(), _faults(**{KEEP: "0"})

    assert kept < left / 4


@pytest.mark.parametrize(
    "environment",
    [
        {KEEP: "0"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"MALLOC_MMAP_MAX_": "10"},
        {"GLIBC_TUNABLES": "glibc.cpu.x=1:glibc.malloc.trim_threshold=1"},
    ],
    ids=str,
)
def test_a_user_who_tells_malloc_something_is_left_alone(environment: dict[str, str]):
    assert not keep_freed_memory(environment)
