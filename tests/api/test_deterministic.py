"""Equal requests give equal bytes, in whatever order a process's sets are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_plans_do_not_depend_on_the_hash_seed(tmp_path: Path):
    texts = set()
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        wish = ["zoo:gpt-tiny", "-c", "cpu:2x2", "--batch", "8", "-o", str(path)]
        command = [sys.executable, "-m", "autopar", "plan", *wish]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
        texts.add(path.read_text())

    assert len(texts) == 1
