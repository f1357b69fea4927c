"""Values of `--set KEY=VALUE`, read as the type that the setting has."""

from __future__ import annotations

import json
from typing import Any

from autopar.errors import UsageError

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_setting(key: str, text: str, now: object) -> Any:
    """Return the text as a value of the type of `now`; where that is `None` or a list, as JSON, else as plain text.

    Raises:
        UsageError: the text is no value of that type.
    """
    if isinstance(now, bool):
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise _wrong_type(key, text, "true or false", now)
    if isinstance(now, int):
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise _wrong_type(key, text, "a whole number", now) from None
    if isinstance(now, float):
        try:
            return float(text)
        except ValueError:
            raise _wrong_type(key, text, "a number", now) from None
    if isinstance(now, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if isinstance(now, list | tuple | dict):
            raise _wrong_type(key, text, "JSON", now) from None
        return text
    if isinstance(now, list | tuple) and not isinstance(value, list):
        raise _wrong_type(key, text, "a JSON list", now)
    return value


def _wrong_type(key: str, text: str, kind: str, now: object) -> UsageError:
    return UsageError(f"--set {key}={text}: {key} is {kind} (now {now!r})")
