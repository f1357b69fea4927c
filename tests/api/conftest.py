"""What tests of this folder share: the programs of published configurations."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.api import validating

_graph = validating._graph.__wrapped__
_captured = cache(lambda _shallow, key: _graph(*key))
"""Programs by how many layers are captured at most, for all tests: capturing takes longer than pricing."""


@pytest.fixture(autouse=True)
def _captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validating, "_graph", lambda *key: _captured(validating.FEW, key))
