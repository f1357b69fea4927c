"""Sharding rules of scans over a sequence (`ir/scan.py`): samples, heads and columns of the state, never steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import autopar.own_scans  # noqa: F401  rules ask for the signatures of its operators
from autopar.ir.scan import ScanCall
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _forward(call: Call) -> Iterator[Strategy]:
    return call.by(ScanCall.read(call.arg("call")).forward)


def _backward(call: Call) -> Iterator[Strategy]:
    return call.by(ScanCall.read(call.arg("call")).backward)


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]]] = {
    "autopar_ops.scan.default": _forward,
    "autopar_ops.scan_backward.default": _backward,
}
