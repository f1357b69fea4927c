"""The captured program: one joint forward+backward list of operators, torch-free.

Names are those of the fx graph it was made from, so that a decision about an
operator finds its node again. Tuple-valued operators appear once; their
elements are read by `Ref(op, index)` (fx's `getitem` nodes do not appear).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Literal, TypeVar

from autopar.ir.tensor import TensorMeta

Phase = Literal["forward", "backward"]
OpKind = Literal["parameter", "buffer", "input", "tangent", "constant", "call"]
OutputKind = Literal["output", "gradient", "mutation"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ref:
    """The value that operator `op` makes; `index` picks one of several."""

    op: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Const:
    """A non-numeric literal argument: `Const("dtype", "float32")`, also `device`, `layout`, `memory_format`."""

    kind: str
    value: str


BALANCED = Const("is_causal", "balanced")
"""In place of the `True` of a causal attention whose query positions a rank may have from both ends of the sequence, so
that all ranks have the same share of the scores below the diagonal."""

Arg = Ref | Const | int | float | bool | str | None | tuple["Arg", ...]
"""An argument: sequences are tuples whatever they were in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator, or one thing the program starts from (a parameter, an input...)."""

    name: str
    """Name of the fx node."""

    kind: OpKind
    target: str
    """`aten.mm.default` for a call; the fully qualified name of a parameter or buffer; the path of an input."""

    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorMeta | None, ...]
    """What it makes; `None` where an element is no tensor."""

    phase: Phase = "forward"
    module: str = ""
    """Path of the module that called it (of the forward operator, for one of the backward): `model.layers.0.mlp`."""

    source: str = ""
    """`file.py:line` in the user's model, empty where unknown."""

    requires_grad: bool = False
    """For a parameter: whether it is trained."""

    refs: tuple[Ref, ...] = field(init=False, repr=False, compare=False)
    """The tensors it reads, in argument order, lists flattened, `None`s left out: said by the arguments."""

    def __post_init__(self) -> None:
        """Note what the arguments refer to; planning asks millions of times."""
        object.__setattr__(self, "refs", tuple(_refs((*self.args, *(value for _, value in self.kwargs)))))

    @property
    def where(self) -> str:
        """Return how to name it to a user: operator, module path and source line."""
        place = ", ".join(part for part in (self.module, self.source) if part)
        return f"{self.target} ({place})" if place else self.target

    @property
    def moved(self) -> str:
        """Return what plans and programs call its value where it is moved: a parameter, an operator and its module."""
        if self.kind in {"parameter", "buffer"}:
            return self.target
        return f"{self.name} ({self.module})" if self.module else self.name


@dataclass(frozen=True, slots=True)
class Output:
    """One result of the program: a user-visible output, a parameter's gradient or a buffer's new value."""

    kind: OutputKind
    name: str
    """Path in the model's return value, or name (fx) of the parameter, input or buffer op concerned."""

    ref: Ref | None
    """What it is; `None` for a gradient that does not exist."""


@dataclass(frozen=True)
class Graph:
    """A program, operators in an order in which each can run."""

    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every name of each tied parameter or buffer, by the name its `Op` bears as target."""

    fold: Mapping[str, str] = field(default_factory=dict)
    """Operator name to the operator that stands for it: equal layers share decisions. Absent: itself."""

    batch_size: int = 0
    """Size of the global batch dimension (dimension 0 of the inputs); 0 where there is none."""

    keeps_narrow: bool = False
    """Whether linear layers that compute in 8 bits keep for backward what they cast, not what they cast it of."""

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """Return the operators by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Return each operator's place in the order."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """Return, for each operator, the operators that read it, in order, once each."""
        readers: dict[str, dict[str, None]] = {op.name: {} for op in self.ops}
        for op in self.ops:
            for ref in op.refs:
                readers[ref.op][op.name] = None
        return {name: tuple(found) for name, found in readers.items()}

    def meta(self, ref: Ref) -> TensorMeta:
        """Return shape and dtype of a value.

        Raises:
            ValueError: the value is no tensor.
        """
        found = self.by_name[ref.op].outputs[ref.index]
        if found is None:
            raise ValueError(f"{ref} is no tensor")
        return found

    def representative(self, name: str) -> str:
        """Return the operator whose decision `name` shares."""
        return self.fold.get(name, name)

    @cached_property
    def representatives(self) -> tuple[Op, ...]:
        """Return the operators that stand for themselves and for all that share their decisions, in order."""
        return tuple(op for op in self.ops if self.fold.get(op.name, op.name) == op.name)

    @cached_property
    def instances(self) -> Mapping[str, tuple[Op, ...]]:
        """Return, for each representative, the operators whose decision it is, in order; whose first comes first."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            found.setdefault(self.fold.get(op.name, op.name), []).append(op)
        return {rep: tuple(ops) for rep, ops in found.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the program: equal for equal programs, on any machine, source lines left out."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(repr((op.name, op.kind, op.target, op.args, op.kwargs, op.outputs, op.phase)).encode())
        digest.update(repr((self.outputs, sorted(self.aliases.items()))).encode())
        return digest.hexdigest()


def _refs(args: tuple[Arg, ...]) -> Iterator[Ref]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def once_per_graph(function: Callable[[Graph], _T]) -> Callable[[Graph], _T]:
    """Return `function` such that what it says of a graph is worked out once and kept with the graph.

    For facts of the graph alone, which every candidate mesh asks for; callers must not edit them.
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(graph: Graph) -> _T:
        kept = vars(graph)  # where `cached_property` keeps its values, too
        if key not in kept:
            kept[key] = function(graph)
        found: _T = kept[key]
        return found

    return remembered


def behind(graph: Graph, kind: str) -> frozenset[str]:
    """Return the operators of a kind, and those that depend on any."""
    found: set[str] = set()
    for op in graph.ops:
        if op.kind == kind or any(ref.op in found for ref in op.refs):
            found.add(op.name)
    return frozenset(found)
