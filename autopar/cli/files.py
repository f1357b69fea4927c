"""Where a command writes: stdout, or the file that `-o` names."""

from __future__ import annotations

import os
import sys
from errno import EACCES
from pathlib import Path

from autopar.errors import UsageError


def write(text: str, output: Path | None) -> None:
    """Write `text` to the file, or to stdout where none (or `-`) is named.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None or str(output) == "-":
        sys.stdout.write(text)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another -o FILE") from error


def require_writable(output: Path) -> None:
    """Check that `output` can be written, before the work whose result goes there; its folder is made.

    Raises:
        UsageError: it cannot.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another -o FILE") from error
    if output.is_dir():
        raise UsageError(f"cannot write {output}: Is a directory; choose another -o FILE")
    is_new = not output.exists()
    try:
        if is_new or output.is_file():
            output.open("ab").close()  # os.access says yes to root, whatever the file system
        elif not os.access(output, os.W_OK):
            raise PermissionError(EACCES, "Permission denied")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another -o FILE") from error
    if is_new:
        output.unlink(missing_ok=True)  # of several ranks
