"""Sharding rules of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.rule import Dims, Rule, letters, plain
from autopar.ir.strategy import Strategy
from autopar.strategies.call import Call


def _added(call: Call, added: str, product: str, rest: str) -> Iterator[Strategy]:
    """Yield the strategies of `added + product`, where what is added broadcasts to the product's shape."""
    rule = Rule.parse(rest)
    out = rule.outputs[0] or ()
    return call.by(
        Rule(
            inputs=(aligned(call.metas[0].shape, out), *rule.inputs),
            outputs=rule.outputs,
            added=frozenset({0}),
        )
    )


def aligned(shape: tuple[int, ...], out: Dims) -> Dims:
    """Return the dimensions of an operand that broadcasts to a result of dimensions `out`."""
    tail = out[len(out) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, tail, strict=True))


def _addmm(call: Call) -> Iterator[Strategy]:
    return _added(call, "self", "mm", "mk kn -> mn")


def _baddbmm(call: Call) -> Iterator[Strategy]:
    return _added(call, "self", "bmm", "bmk bkn -> bmn")


def _addmv(call: Call) -> Iterator[Strategy]:
    return _added(call, "self", "mv", "mk k -> m")


def _addbmm(call: Call) -> Iterator[Strategy]:
    return _added(call, "self", "bmm", "bmk bkn -> mn")


def _addr(call: Call) -> Iterator[Strategy]:
    return _added(call, "self", "outer", "m n -> mn")


def _distances(call: Call) -> Iterator[Strategy]:
    """Yield those of distances between all rows of one tensor and all of another: [..., p, m] [..., r, m]."""
    return call.by(_between_rows(call, ("x1", "x2"), "pr"))


def _distances_backward(call: Call) -> Iterator[Strategy]:
    gradient = "grad" if call.index("grad") is not None else "grad_output"  # its name from torch 2.14 on
    return call.by(_between_rows(call, (gradient, "x1", "x2", "cdist"), "pm"))


def _between_rows(call: Call, operands: tuple[str, ...], result: str) -> Rule:
    ends = {"x1": "pm", "x2": "rm"}
    batch = letters(len(call.result()) - 2)
    return Rule(
        inputs=tuple(
            (*aligned(call.shape(name)[:-2], plain(batch)), *plain(f"{each}'" for each in ends.get(name, "pr")))
            for name in operands
        ),
        outputs=((*plain(batch), *plain(f"{each}'" for each in result)),),
        whole=frozenset({"m'"}),
        linear=(frozenset({0}),) if result == "pm" else (),
    )


def _trilinear(call: Call) -> Iterator[Strategy]:
    """Yield those of a sum of products of three tensors, each first widened by dimensions of size 1 (`nn.Bilinear`)."""
    wide = len(call.metas[0].shape) + len(call.arg("expand1"))
    names = letters(wide)
    added = [{int(dim) % wide for dim in call.arg(f"expand{i}")} for i in (1, 2, 3)]
    summed = {int(dim) % wide for dim in call.arg("sumdim")}
    inputs = tuple(
        plain(
            None if size == 1 else names[dim]
            for dim, size in zip(sorted({*range(wide)} - new), meta.shape, strict=True)
        )
        for new, meta in zip(added, call.metas, strict=True)
    )
    out = plain(name for dim, name in enumerate(names) if dim not in summed)
    return call.by(Rule(inputs=inputs, outputs=(out,), linear=tuple(frozenset({i}) for i in range(3))))


RULES: Mapping[str, Callable[[Call], Iterable[Strategy]] | Rule] = {
    "aten.mm.default": Rule.parse("mk kn -> mn"),
    "aten.bmm.default": Rule.parse("bmk bkn -> bmn"),
    "aten.mv.default": Rule.parse("mk k -> m"),
    "aten.dot.default": Rule.parse("k k -> ."),
    "aten.vdot.default": Rule.parse("k k -> ."),
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.addmv.default": _addmv,
    "aten.addbmm.default": _addbmm,
    "aten.addr.default": _addr,
    "aten._euclidean_dist.default": _distances,
    "aten._cdist_forward.default": _distances,
    "aten._cdist_backward.default": _distances_backward,
    "aten._pdist_forward.default": Rule.parse("__ -> _"),
    "aten._pdist_backward.default": Rule.parse("_ _m _ -> _m", linear=[[0]]),
    "aten._trilinear.default": _trilinear,
    "aten._scaled_mm.default": lambda call: (call.replicated(),),
}
