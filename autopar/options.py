"""What a user may ask of the planner: the flags of `autopar plan`, which are the keywords of `plan` and `compile`.

Values arrive as text (command line) or as Python values (keywords) and are
parsed and checked here, once; everything behind reads a valid `PlanOptions`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from autopar.errors import UsageError
from autopar.ir.mesh import AXIS_NAMES
from autopar.ir.placement import Partial, Placement, parse_placement
from autopar.suggest import did_you_mean

Precision = Literal["fp32", "bf16", "fp16", "auto"]
ReduceDtype = Literal["fp32", "own"]
Optimizer = Literal["sgd", "adam", "adamw", "none"]
Setting = int | str | bool
"""Value of a fixed choice: a degree, a name, a switch."""

PRECISIONS = ("fp32", "bf16", "fp16", "auto")
REDUCE_DTYPES = ("fp32", "own")
OPTIMIZERS = ("sgd", "adam", "adamw", "none")

_COUNTS = (*AXIS_NAMES, "microbatch", "interleave", "batch_overlap")
_NAMED: Mapping[str, tuple[str, ...]] = {
    "schedule": ("none", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"),
    "recompute": ("none", "casts", "cheap", "selective", "per_operator", "keep_attention", "full"),
}
_ZERO_STAGES = range(4)
_SWITCHES = ("sequence_parallel",)
FIX_KEYS = (
    "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep",
    "microbatch", "schedule", "interleave", "recompute", "zero", "sequence_parallel", "batch_overlap",
)  # fmt: skip
"""What `fix` may name, in the order of the contract."""

FORBID_KEYS = tuple(key for key in FIX_KEYS if key not in {"microbatch", "schedule"})
"""What `forbid` may name: choices that can be done without (a degree of 1, no recomputation, no sharded state)."""

_CONSTRAINT = re.compile(r"(?P<name>[^=]+)=(?P<placement>[^@]+)@(?P<axis>\w+)")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A parameter's placement at rest along one axis, as the user demands it."""

    name: str
    """Fully qualified name; `*` stands for any text."""

    placement: Placement
    axis: str

    def __str__(self) -> str:
        return f"{self.name}={self.placement}@{self.axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Every wish about a plan, valid by itself; whether it can be met, the search says.

    Build it with `PlanOptions.parse`, which takes text and Python values alike.
    """

    batch: int | None = None
    """Global batch, sequences or samples a step; None: that of the example inputs."""

    seq: int | None = None
    """Sequence length; None: that of the example inputs or the model's own."""

    set: Mapping[str, str] = field(default_factory=dict)
    """Overrides of the model's configuration, as text: the model knows the type of each."""

    precision: Precision = "fp32"
    """Type of the computation (autocast, and products of experts; parameters stay as they are); `auto`: the faster of
    fp32 and bf16."""

    reduce_dtype: ReduceDtype = "own"
    """In which type gradients of 16 bits are summed over ranks: their own, or float32, which moves twice the bytes.

    As `reduce_dtype` of FSDP2's MixedPrecisionPolicy, whose default is the parameters' type of the computation, too.
    Sums over micro-batches are in the parameter's own type either way.
    """

    optimizer: Optimizer = "adamw"
    fix: Mapping[str, Setting] = field(default_factory=dict)
    forbid: tuple[str, ...] = ()
    constraint: tuple[Constraint, ...] = ()
    memory_margin: float = 0.10
    """Share of a device's memory that stays free."""

    time_limit: float = 60.0
    """Seconds of computing that the search may take: a busy machine takes longer, to the same plan."""

    gap: float = 0.01
    """Share by which the plan may be slower than the proven bound."""

    seed: int = 0
    top_k: int = 5
    """Candidates kept as alternatives."""

    strict: bool = False
    """Whether an operator without a sharding rule is an error."""

    overlap: bool = True
    """Whether collectives are merged, issued ahead of use and given streams of their own, where that is faster."""

    two_level: bool = True
    """Whether collectives run inside the fast links, across them and inside again, where that is faster."""

    keep_outputs: bool | None = None
    """Whether steps of training keep what a model returns beside its loss of all micro-batches; None: if it fits."""

    @classmethod
    def parse(cls, **options: Any) -> PlanOptions:
        """Return the options that keywords name; a value may be text, as on the command line.

        `fix` and `set` take a mapping or `KEY=VALUE` texts, `forbid` and `constraint` one text or several.
        None stands for the default.

        Raises:
            UsageError: an unknown option, a value that is none, or wishes that contradict one another.
        """
        names = tuple(each.name for each in fields(cls))
        for name in options:
            if name not in names:
                raise unknown_option(name, names)
        parsed = {name: _PARSERS[name](value) for name, value in options.items() if value is not None}
        made = cls(**parsed)
        _check_no_contradiction(made)
        return made

    @property
    def constraints(self) -> dict[str, Any]:
        """Return what the user demanded of the search, as the plan file records it."""
        demanded: dict[str, Any] = {"memory_margin": self.memory_margin}
        if self.reduce_dtype != "own":
            demanded["reduce_dtype"] = self.reduce_dtype
        if self.fix:
            demanded["fix"] = dict(self.fix)
        if self.forbid:
            demanded["forbid"] = list(self.forbid)
        if self.constraint:
            demanded["constraint"] = [str(each) for each in self.constraint]
        if not self.overlap:
            demanded["overlap"] = False
        if not self.two_level:
            demanded["two_level"] = False
        if self.keep_outputs is not None:
            demanded["keep_outputs"] = self.keep_outputs
        return demanded


class OptionKeywords(TypedDict, total=False):
    """The keywords of `plan` and `compile` for type checkers: the fields of `PlanOptions`, which may come as text."""

    batch: int | str | None
    seq: int | str | None
    set: Mapping[str, Any] | Iterable[str] | str | None
    precision: str | None
    reduce_dtype: str | None
    optimizer: str | None
    fix: Mapping[str, Setting] | Iterable[str] | str | None
    forbid: Iterable[str] | str | None
    constraint: Iterable[str | Constraint] | str | None
    memory_margin: float | str | None
    time_limit: float | str | None
    gap: float | str | None
    seed: int | str | None
    top_k: int | str | None
    strict: bool | str | None
    overlap: bool | str | None
    two_level: bool | str | None
    keep_outputs: bool | str | None


def unknown_option(name: str, known: Iterable[str]) -> UsageError:
    """Return the error about a keyword that is no option."""
    known = tuple(known)
    return UsageError(f"unknown option {name!r}{did_you_mean(name, known)}; options are {', '.join(known)}")


def unknown_key(flag: str, key: str, known: Iterable[str]) -> UsageError:
    """Return the error about a key that `flag` does not know."""
    known = tuple(known)
    return UsageError(f"{flag} {key}: unknown key {key!r}{did_you_mean(key, known)}; keys are {', '.join(known)}")


def bad_value(flag: str, value: object, wanted: str) -> UsageError:
    """Return the error about a value that is not what `flag` takes."""
    return UsageError(f"{flag} {value}: must be {wanted}")


def said_twice(flag: str, key: str, first: object, second: object) -> UsageError:
    """Return the error about one key given two values."""
    return UsageError(f"{flag} gives {key} twice, as {first} and as {second}; keep one of them")


def not_a_pair(flag: str, text: object) -> UsageError:
    """Return the error about an entry that is no KEY=VALUE."""
    return UsageError(f"{flag} {text}: must be KEY=VALUE, such as {_PAIR_EXAMPLE.get(flag, 'tp=8')}")


_PAIR_EXAMPLE = {"--fix": "tp=8", "--set": "num_hidden_layers=4"}


def bad_constraint(text: str, why: str) -> UsageError:
    """Return the error about a constraint that does not read as one."""
    return UsageError(
        f"--constraint {text!r}: {why}; write PARAMETER=PLACEMENT@AXIS, such as 'lm_head.weight=Shard(0)@tp', with an "
        f"axis of {', '.join(AXIS_NAMES)}"
    )


def _count(flag: str, value: object, least: int = 1) -> int:
    wanted = f"a whole number of at least {least}"
    if isinstance(value, bool):
        raise bad_value(flag, value, wanted)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        raise bad_value(flag, value, wanted) from None
    if not isinstance(number, int) or number < least:
        raise bad_value(flag, value, wanted)
    return number


def _share(flag: str, value: object) -> float:
    """Return a share below 1: `10%`, `0.1`."""
    wanted = "a share of at least 0 and below 1, such as 10% or 0.1"
    text = str(value).strip()
    try:
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise bad_value(flag, value, wanted) from None
    if not 0 <= number < 1:
        raise bad_value(flag, value, wanted)
    return number


def _seconds(flag: str, value: object) -> float:
    wanted = "seconds above 0, such as 60"
    text = str(value).strip()
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        raise bad_value(flag, value, wanted) from None
    if not (number > 0 and math.isfinite(number)):
        raise bad_value(flag, value, wanted)
    return number


def _choice(flag: str, value: object, known: tuple[str, ...]) -> str:
    word = "none" if value is None else str(value).lower().replace("-", "_")
    if word not in known:
        raise bad_value(flag, value, f"one of {', '.join(known)}{did_you_mean(str(value), known)}")
    return word


_SWITCH_WORDS = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


def _switch(flag: str, value: object) -> bool:
    found = _SWITCH_WORDS.get(str(value).lower())
    if found is None:
        raise bad_value(flag, value, "on or off")
    return found


def _setting(key: str, value: object) -> Setting:
    """Return the value of `--fix key=value`."""
    flag = "--fix"
    if key not in FIX_KEYS:
        raise unknown_key(flag, key, FIX_KEYS)
    shown = f"{flag} {key}="
    try:
        if key in _COUNTS:
            return _count(flag, value)
        if key in _NAMED:
            return _choice(flag, value, _NAMED[key])
        if key in _SWITCHES:
            return _switch(flag, value)
        zero = _count(flag, value, least=0)
    except UsageError as error:
        raise UsageError(str(error).replace(f"{flag} ", shown, 1)) from None
    if zero not in _ZERO_STAGES:
        raise UsageError(f"{shown}{value}: must be 0, 1, 2 or 3")
    return zero


def _pairs(flag: str, value: object) -> list[tuple[str, object]]:
    """Return KEY, VALUE of a mapping, of one `KEY=VALUE` text or of several."""
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
    pairs: list[tuple[str, object]] = []
    for text in _listed(flag, value) if flag == "--fix" else _texts(flag, value):
        key, equals, rest = text.partition("=")
        if not (equals and key.strip() and rest.strip()):
            raise not_a_pair(flag, text)
        pairs.append((key.strip(), rest.strip()))
    return pairs


def _texts(flag: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Iterable):
        return [str(each) for each in value]
    raise bad_value(flag, value, "a text or a list of texts")


def _listed(flag: str, value: object) -> list[str]:
    """Return the entries of texts in which commas separate some, as in `--fix tp=2,pp=1`."""
    return [part.strip() for text in _texts(flag, value) for part in text.split(",")]


def _once(flag: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a mapping; a key may come again with the same value only."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise said_twice(flag, key, found[key], value)
        found[key] = value
    return found


def _fix(value: object) -> Mapping[str, Setting]:
    found = _once("--fix", ((key.replace("-", "_"), each) for key, each in _pairs("--fix", value)))
    checked = {key: _setting(key, each) for key, each in found.items()}
    return {key: checked[key] for key in FIX_KEYS if key in checked}


def _set(value: object) -> Mapping[str, str]:
    pairs = _pairs("--set", value)
    return _once("--set", ((key, each if isinstance(each, str) else json.dumps(each)) for key, each in pairs))


def _forbid(value: object) -> tuple[str, ...]:
    keys = {key.replace("-", "_") for key in _listed("--forbid", value)}
    for key in sorted(keys):
        if key not in FORBID_KEYS:
            raise unknown_key("--forbid", key, FORBID_KEYS)
    return tuple(key for key in FORBID_KEYS if key in keys)


def _constraints(value: object) -> tuple[Constraint, ...]:
    if isinstance(value, Constraint):
        return (value,)
    if not isinstance(value, str) and isinstance(value, Iterable):
        found = [each for entry in value for each in _constraints(entry)]
    else:
        found = [_constraint(text) for text in _texts("--constraint", value)]
    by_place = _once("--constraint", ((f"{each.name} on {each.axis}", each.placement) for each in found))
    axes_of = {f"{each.name} on {each.axis}": each for each in found}
    return tuple(axes_of[place] for place in by_place)


def _constraint(text: str) -> Constraint:
    match = _CONSTRAINT.fullmatch(text.strip())
    if match is None:
        raise bad_constraint(text, "does not read as a constraint")
    name, axis = match["name"].strip(), match["axis"]
    if axis not in AXIS_NAMES:
        raise bad_constraint(text, f"{axis!r} is no mesh axis{did_you_mean(axis, AXIS_NAMES)}")
    try:
        placement = parse_placement(match["placement"])
    except ValueError as error:
        raise bad_constraint(text, str(error)) from None
    if isinstance(placement, Partial):
        raise bad_constraint(text, f"a parameter cannot rest as {placement}; it is Replicate() or Shard(DIM)")
    return Constraint(name, placement, axis)


_PARSERS: Mapping[str, Any] = {
    "batch": lambda value: _count("--batch", value),
    "seq": lambda value: _count("--seq", value),
    "set": _set,
    "precision": lambda value: _choice("--precision", value, PRECISIONS),
    "reduce_dtype": lambda value: _choice("--reduce-dtype", value, REDUCE_DTYPES),
    "optimizer": lambda value: _choice("--optimizer", value, OPTIMIZERS),
    "fix": _fix,
    "forbid": _forbid,
    "constraint": _constraints,
    "memory_margin": lambda value: _share("--memory-margin", value),
    "time_limit": lambda value: _seconds("--time-limit", value),
    "gap": lambda value: _share("--gap", value),
    "seed": lambda value: _count("--seed", value, least=0),
    "top_k": lambda value: _count("--top-k", value),
    "strict": lambda value: _switch("--strict", value),
    "overlap": lambda value: _switch("--overlap", value),
    "two_level": lambda value: _switch("--two-level", value),
    "keep_outputs": lambda value: _switch("--keep-outputs", value),
}
"""How each option is read."""


_OFF: Mapping[str, Setting] = {"recompute": "none", "zero": 0, "sequence_parallel": False}
"""What a fixed choice is when it is not used; a degree is then 1."""


def _check_batch_overlap(fix: Mapping[str, Setting]) -> None:
    at_once = int(fix.get("batch_overlap", 1))
    if at_once > 2:
        raise UsageError(f"--fix batch_overlap={at_once}: micro-batches run one at a time (1) or two (2)")
    if at_once == 2 and int(fix.get("pp", 1)) > 1:
        raise UsageError(
            "--fix batch_overlap=2 runs two micro-batches at once in a program without stages, and "
            f"--fix pp={fix['pp']} asks for stages; leave one of them out"
        )


def _may_shard(options: PlanOptions) -> bool:
    """Return whether the degrees leave ranks that copies can be sharded over: of `dp_shard`, or of `cp` and `ep`."""
    if any(int(options.fix.get(axis, 1)) > 1 for axis in ("cp", "ep")):
        return True
    return "dp_shard" not in options.forbid and options.fix.get("dp_shard") != 1


def _check_no_contradiction(options: PlanOptions) -> None:
    fix = options.fix
    for key in options.forbid:
        if key in fix and fix[key] != _OFF.get(key, 1):
            raise UsageError(f"--fix {key}={fix[key]} and --forbid {key} contradict each other; keep one of them")
    for each in options.constraint:
        if each.axis in options.forbid or fix.get(each.axis) == 1:
            how = f"--forbid {each.axis}" if each.axis in options.forbid else f"--fix {each.axis}=1"
            raise UsageError(f"--constraint '{each}' needs the axis {each.axis}, which {how} rules out")
    if fix.get("zero") and not _may_shard(options):
        off = "--forbid dp_shard" if "dp_shard" in options.forbid else "--fix dp_shard=1"
        raise UsageError(
            f"--fix zero={fix['zero']} shards what a rank would hold a copy of, but {off} leaves no ranks to shard it "
            "over; leave one of them out, or fix cp or ep above 1"
        )
    if int(fix.get("interleave", 1)) > 1 and fix.get("pp") == 1:
        raise UsageError(f"--fix interleave={fix['interleave']} needs pipeline stages, but --fix pp=1 rules them out")
    _check_batch_overlap(fix)
    batch, micro = options.batch, fix.get("microbatch")
    if batch is not None and micro is not None and batch % int(micro):
        raise UsageError(
            f"--batch {batch} cannot be cut into micro-batches of {micro} (--fix microbatch={micro}); "
            f"take a divisor of {batch}"
        )
    groups = math.prod(int(fix.get(axis, 1)) for axis in ("dp_replicate", "dp_shard", "ep"))
    if batch is not None and batch % groups:
        raise UsageError(
            f"--batch {batch} cannot be split over {groups} data-parallel groups (dp_replicate x dp_shard x ep); take "
            f"a multiple of {groups}"
        )
