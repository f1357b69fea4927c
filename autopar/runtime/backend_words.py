"""What a communication backend says of a message that did not come, in a few words of our own where these are known."""

from __future__ import annotations

import re

_CLOSED = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")
_TIMED_OUT = re.compile(r"timed out waiting (\d+)ms", re.IGNORECASE)
_FROM_SOURCE = re.compile(r"^\[[^\]]*\] ")
"""The line of its own source with which gloo begins a message."""


def plainly(cause: str) -> str:
    """Return what went wrong, on a line: why a connection closed, nobody knows here, and gloo's guesses are no help."""
    if any(each in cause.lower() for each in _CLOSED):
        return "its connection closed"
    late = _TIMED_OUT.search(cause)
    if late:
        return f"nothing came for {int(late[1]) / 1000:g} s"
    lines = _FROM_SOURCE.sub("", cause).splitlines()
    return lines[0].rstrip(".") if lines else "no message"
