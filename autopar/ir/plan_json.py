"""The plan file: `Plan` <-> the JSON text of the contract.

Equal plans give equal bytes. `digest` holds a checksum of each part of the
file, so that a plan edited by hand is not run as if the search had made it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.ir.codec import DecodeError, decode, encode, object_schema
from autopar.ir.placement import Layout
from autopar.ir.plan import Decisions, Plan

FORMAT_VERSION = "1.0"
"""A minor step adds fields, a major step breaks."""

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
_MAJOR = FORMAT_VERSION.partition(".")[0]
_FIRST = ("format_version", "autopar_version")
"""What a reader has to know before the rest."""

_LINE = 110
"""Columns up to which a list or object stays on one line."""

_NUMBERED = re.compile(r"_\d+$")
"""Ends the name of a second axis of one degree: `tp_2`."""

_TOLERANCE = 1e-6
"""Relative; sums of floats, written with all their digits."""


def to_json(plan: Plan) -> str:
    """Return the plan as text: equal plans give equal bytes.

    Raises:
        ValueError: the plan contradicts itself, or a figure is not finite; its maker has an error.
    """
    for path, problem in inconsistencies(plan):
        raise ValueError(f"the plan contradicts itself: {path} {problem}")
    fields = encode(plan)
    document = {key: fields.pop(key) for key in _FIRST} | fields
    document["digest"] = _digests(document)
    return f"{_pretty(document, 0)[0]}\n"


def from_json(text: str, name: str = "plan") -> Plan:
    """Return the plan that `text` holds; `name` is what errors call it.

    Raises:
        UsageError: the text is cut short, no JSON, of another format, incomplete, inconsistent or edited.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(name, text, error) from None
    except RecursionError:
        raise UsageError(f"{name} is no plan file: it nests thousands of lists or objects") from None
    if not isinstance(document, Mapping) or "format_version" not in document:
        raise UsageError(f"{name} is no plan file: it has no format_version; `autopar plan MODEL -o FILE` writes one")
    _check_version(name, document["format_version"])
    try:
        plan: Plan = decode(Plan, document)
    except DecodeError as error:
        raise _malformed(name, error) from None
    for path, problem in inconsistencies(plan):
        raise _malformed(name, DecodeError(path, problem))
    _check_digests(name, document)
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan file, whole or not at all; folders are made.

    Raises:
        UsageError: the file cannot be written.
    """
    target = Path(path).resolve()
    text = to_json(plan)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe or terminal cannot be replaced
            target.write_text(text, encoding="utf-8")
            return
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write the plan to {path}: {error.strerror}; choose another -o FILE") from error


def load(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file.

    Raises:
        UsageError: the file cannot be read, or holds no valid plan.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no plan file: it is not UTF-8 text") from None
    return from_json(text, str(path))


def decisions_digest(plan: Plan) -> str:
    """Return a checksum of what a plan decides for which program; another prediction of the same does not change it."""
    decided = encode(replace(plan.decisions, collectives=()))  # they say what they are predicted to take
    return _digest([plan.fingerprint.graph, plan.workload.global_batch, decided])


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of the plan file."""
    definitions: dict[str, Any] = {}
    root = object_schema(Plan, definitions)
    root["required"] = [*root["required"], "format_version", "digest"]
    root["properties"]["format_version"] = {"type": "string", "pattern": rf"^{_MAJOR}\.\d+$"}
    root["properties"]["digest"] = {"type": "object", "additionalProperties": {"type": "string"}}
    return {"$schema": SCHEMA_ID, "title": "autopar plan", **root, "$defs": dict(sorted(definitions.items()))}


def inconsistencies(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield path and problem of everything in a plan that contradicts something else in it."""
    yield from _mesh_inconsistencies(plan.decisions)
    yield from _layout_inconsistencies(plan.decisions)
    estimates = plan.estimates
    parts = estimates.breakdown
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s + parts.host_s
    if not math.isclose(total, estimates.step_time_s, rel_tol=_TOLERANCE, abs_tol=1e-12):
        yield "estimates.breakdown", f"adds up to {total:.6g} s, but step_time_s is {estimates.step_time_s:.6g} s"
    if estimates.memory.total != estimates.peak_memory_bytes:
        yield (
            "estimates.memory",
            f"adds up to {estimates.memory.total} bytes, but peak_memory_bytes is {estimates.peak_memory_bytes}",
        )


def _mesh_inconsistencies(decisions: Decisions) -> Iterator[tuple[str, str]]:
    mesh, degrees = decisions.mesh, decisions.degrees
    for axis in mesh.axes:
        if axis.size < 1:
            yield "decisions.mesh", f"axis {axis.name} has size {axis.size}; sizes are at least 1"
    if len(set(mesh.names)) != len(mesh.names):
        yield "decisions.mesh", f"an axis is named twice: {', '.join(mesh.names)}"
    depth = 1 if "pp" in mesh.names else degrees.get("pp", 1)
    product, world = math.prod(degrees.values()), mesh.world_size * depth
    if product != world:
        shown = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        has = f"the mesh ({mesh}) has {mesh.world_size}" + (f" on each of {depth} pipeline ranks" if depth > 1 else "")
        yield "decisions.degrees", f"{shown} is {product} ranks, but {has}"
    sizes: dict[str, int] = {}
    for axis in mesh.axes:
        kind = _NUMBERED.sub("", axis.name)
        sizes[kind] = sizes.get(kind, 1) * axis.size
    for kind, size in sizes.items():
        if degrees.get(kind, 1) != size:
            yield f"decisions.degrees.{kind}", f"is {degrees.get(kind, 1)}, but the mesh has {kind}={size}"
    for i, each in enumerate(decisions.collectives):
        if each.axis not in mesh.names:
            yield f"decisions.collectives[{i}].axis", f"{each.axis!r} is no axis of the mesh ({mesh})"
    for i, stage in enumerate(decisions.stages):
        if any(not 0 <= rank < world for rank in stage.ranks):
            yield f"decisions.stages[{i}].ranks", f"names a rank outside 0..{world - 1}"
    yield from _block_inconsistencies(decisions)


def _block_inconsistencies(decisions: Decisions) -> Iterator[tuple[str, str]]:
    """Yield stages whose ranks are not those of one pipeline rank: as many as the mesh has, in no other block."""
    if len(decisions.stages) < 2 or "pp" in decisions.mesh.names:
        return
    width = decisions.mesh.world_size
    stage_of: dict[int, int] = {}
    for i, stage in enumerate(decisions.stages):
        if len(set(stage.ranks)) != width:
            yield f"decisions.stages[{i}].ranks", f"names {len(set(stage.ranks))} ranks, but the mesh has {width}"
        for rank in stage.ranks:
            first = stage_of.setdefault(rank, i)
            if decisions.stages[first].ranks != stage.ranks:
                yield (
                    f"decisions.stages[{i}].ranks",
                    f"names rank {rank} of stage {first}, but not all the ranks of that in the same order",
                )
                break


def _layout_inconsistencies(decisions: Decisions) -> Iterator[tuple[str, str]]:
    count, names = len(decisions.mesh.axes), ", ".join(decisions.mesh.names)

    def wrong(path: str, layout: Layout | None) -> Iterator[tuple[str, str]]:
        if layout is not None and len(layout) != count:
            yield path, f"has {len(layout)} placements, but the mesh has {count} axes ({names}), one placement each"

    for name, parameter in decisions.parameters.items():
        yield from wrong(f"decisions.parameters.{name}.placements", parameter.placements)
    for name, output in decisions.outputs.items():
        yield from wrong(f"decisions.outputs.{name}", output)
    for name, operator in decisions.operators.items():
        at = f"decisions.operators.{name}.strategy"
        for side in ("inputs", "outputs"):
            for i, layout in enumerate(getattr(operator.strategy, side)):
                yield from wrong(f"{at}.{side}[{i}]", layout)
        if len(operator.strategy.axes) != count:
            yield f"{at}.axes", f"has {len(operator.strategy.axes)} strategies, but the mesh has {count} axes ({names})"


def _pretty(value: Any, indent: int) -> tuple[str, bool]:
    """Return `value` as JSON with short containers on one line, and whether it is on one line."""
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False, allow_nan=False), True
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    pairs = value.items() if isinstance(value, dict) else (("", each) for each in value)
    parts, flat = [], True
    for key, each in pairs:
        text, one_line = _pretty(each, indent + 1)
        parts.append(f"{json.dumps(key, ensure_ascii=False)}: {text}" if isinstance(value, dict) else text)
        flat = flat and one_line
    if flat and sum(map(len, parts)) + 2 * len(parts) + indent <= _LINE:
        return f"{opening}{', '.join(parts)}{closing}", True
    space = " " * indent
    inside = f",\n{space} ".join(parts)
    return f"{opening}\n{space} {inside}\n{space}{closing}", False


def _parts(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a plan file that have their own checksum."""
    for key, value in document.items():
        if key == "decisions":
            yield from ((f"decisions.{name}", each) for name, each in value.items())
        elif key != "digest":
            yield key, value


def _digests(document: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest(part) for name, part in _parts(document)}


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _check_digests(name: str, document: Mapping[str, Any]) -> None:
    noted = document.get("digest")
    if not isinstance(noted, Mapping):
        raise _malformed(name, DecodeError("digest", "is missing"))
    found = _digests(document)
    changed = [part for part in {**noted, **found} if noted.get(part) != found.get(part)]
    if changed:
        raise UsageError(
            f"{name} was edited after autopar wrote it: {', '.join(changed)} changed. A plan is only valid as a whole; "
            "ask `autopar plan` for what you want instead, with --fix, --forbid or --constraint"
        )


def _check_version(name: str, version: object) -> None:
    if not isinstance(version, str) or version.partition(".")[0] != _MAJOR:
        raise UsageError(
            f"{name} has format_version {version!r}, and this autopar reads {_MAJOR}.x; plan again with this version, "
            "or use the version named in its autopar_version"
        )


def _not_json(name: str, text: str, error: json.JSONDecodeError) -> UsageError:
    cut_short = text.lstrip().startswith("{") and error.pos >= len(text.rstrip())
    if not text.strip():
        what = "is empty"
    elif cut_short or error.msg.startswith("Unterminated string"):
        what = f"is cut short: it ends within the JSON text, in line {error.lineno}"
    else:
        what = f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
    return UsageError(f"{name} {what}; write it again with `autopar plan MODEL -o FILE`")


def _malformed(name: str, error: DecodeError) -> UsageError:
    return UsageError(f"{name}: {error.path} {error.problem}; write the plan again with `autopar plan MODEL -o FILE`")
