"""Why the first rank of a job stopped, for the others to say: a note in the store that all ranks share."""

from __future__ import annotations

from autopar._torch import default_store


def leave(pipeline: str, text: str) -> None:
    """Leave a note for a pipeline, unless another rank did before; where the store cannot be reached there is none."""
    try:
        default_store().compare_set(_key(pipeline), "", text)
    except RuntimeError:
        return


def read(pipeline: str) -> str:
    """Return the note of the first rank that stopped by an error of its own; empty where there is none."""
    key = _key(pipeline)
    try:
        store = default_store()
        return str(store.get(key).decode()) if store.check([key]) else ""
    except RuntimeError:
        return ""


def _key(pipeline: str) -> str:
    return f"autopar/stopped/{pipeline}"
