"""Python looks for cycles among objects less often while a plan is made: a search makes millions, most of which stay.

With the default thresholds, planning Llama-3-70B on 128 GPUs spent 6 of 79 s on that, now 2.5 (imports and capture
included).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 50)
"""New objects until the youngest are looked at; how often until those next to them are, and then all."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave what is there alone, and look at new objects seldom; afterwards all is as the user had it.

    A user who has turned collection off or made it as seldom, or frozen objects, has reasons: then that stays.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _THRESHOLDS[0]:
        yield  # without asking what is frozen: Python counts every object for that
        return
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
