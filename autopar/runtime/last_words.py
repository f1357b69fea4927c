"""What ended a rank, left where torchrun looks for it: its own summary knows no more than a status of 1."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, RanksDisagreeError
from autopar.runtime.errors import CollectiveError, PeerLostError

FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable by which torchrun names the file, as for `torch.distributed.elastic`'s `record`."""


@functools.cache
def keep_last_words() -> None:
    """See to it that the exception which ends this process is told in torchrun's file, if it names one."""
    if os.environ.get(FILE):
        atexit.register(_leave, Path(os.environ[FILE]))


def last_words(error: BaseException) -> dict[str, Any]:
    """Return what torchrun's file is to hold of an exception, in its own form.

    `lost` says that another rank failed before, and `errorCode` is the status of `autopar run`.
    """
    told = {
        "message": f"{type(error).__name__}: {error}",
        "errorCode": error.exit_code if isinstance(error, AutoparError) else 1,
        "lost": isinstance(error, PeerLostError | CollectiveError | RanksDisagreeError),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    return {"message": told}


def _leave(file: Path) -> None:
    error = getattr(sys, "last_value", None)  # set where an exception ends the script, before exit functions are called
    if isinstance(error, BaseException) and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(last_words(error)), encoding="utf-8")
