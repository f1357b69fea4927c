"""A script of which one rank fails is a failure that shows that rank's error, though others wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script

SCRIPT = """
import os, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("rank one has had enough")
time.sleep(60 * (int(os.environ["WORLD_SIZE"]) - 1))
"""


def test_a_failing_rank_is_shown_and_the_others_are_ended(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    with pytest.raises(AssertionError, match=r"(?s)script.py: ranks \[1\] failed.*ranks \[0\] .*ValueError: rank one"):
        run_script(path, 2)


def test_what_rank_0_prints_is_returned(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    assert run_script(path, 1) == "rank 0 of 1\n"
