"""The line that an error names is of the user's model."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.capture.origin import user_line


def _trace(*files: object) -> str:
    return "\n".join(f'  File "{file}", line {at}, in forward' for at, file in enumerate(files, start=1))


def test_the_innermost_line_that_is_not_torchs_counts() -> None:
    torch_file = Path(torch.__file__).parent / "nn" / "modules" / "module.py"

    assert user_line(_trace("/models/net.py", "/models/block.py", torch_file)) == "/models/block.py:2"


def test_torch_is_known_behind_a_link_as_well(tmp_path: Path) -> None:
    """An environment that is linked into a working copy."""
    link = tmp_path / "linked"
    link.symlink_to(Path(torch.__file__).parent)

    assert user_line(_trace("/models/net.py", link / "nn" / "modules" / "module.py")) == "/models/net.py:1"


def test_code_without_a_file_is_no_line() -> None:
    assert user_line(_trace("<string>")) == ""
