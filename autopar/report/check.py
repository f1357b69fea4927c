"""Checks of a plan for CI: limits, regressions against a baseline, staleness."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.figures import format_bytes, format_change, format_seconds
from autopar.ir.plan import Plan
from autopar.suggest import did_you_mean

RULES: Mapping[str, str] = {
    "over-budget": "the predicted peak memory fits in the budget of a device",
    "stale": "the plan was made for this cluster and this torch",
    "step-time-limit": "the step time is within the policy's limit",
    "peak-memory-limit": "the peak memory is within the policy's limit",
    "communication-limit": "the communication of a step is within the policy's limit",
    "mfu-limit": "the model FLOPs utilisation reaches the policy's least",
    "gap-limit": "the gap to the proven bound is within the policy's limit",
    "warning": "the plan has no warning that the policy forbids",
    "other-workload": "the baseline is a plan for the same model, batch and sequence length",
    "step-time-regression": "the step time is not worse than the baseline's",
    "peak-memory-regression": "the peak memory is not worse than the baseline's",
    "communication-regression": "the communication of a step is not worse than the baseline's",
}
"""Every rule and the fact it checks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a plan breaks."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which rules were checked of which file, and what was found."""

    path: str
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of one plan, and how much worse than the baseline it may be (relative)."""

    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    communication_bytes: float | None = None
    min_mfu: float | None = None
    max_gap: float | None = None
    forbid_warnings: tuple[str, ...] = ()
    """Codes of warnings that fail the check; `*` is every one."""

    tolerance: Mapping[str, float] = field(default_factory=dict)
    """By `step_time`, `peak_memory`, `communication`."""


DEFAULT_TOLERANCE = 0.02
"""Share by which a figure may grow over the baseline's without being called a regression."""

_LIMITS = ("step_time_s", "peak_memory_bytes", "communication_bytes", "min_mfu", "max_gap")
_COMPARED = ("step_time", "peak_memory", "communication")


@dataclass(frozen=True, slots=True)
class Here:
    """What a plan would run on; None where it is not known, and then not checked."""

    cluster: Mapping[str, Any] | None = None
    torch: str | None = None


def check(
    plan: Plan, path: str, *, baseline: Plan | None = None, policy: Policy | None = None, here: Here | None = None
) -> Verdict:
    """Return what was checked of a plan and every rule it breaks, in the order of `RULES`."""
    policy, here = policy or Policy(), here or Here()
    results = {
        **_budget(plan),
        **_stale(plan, here),
        **_limits(plan, policy),
        **_regressions(plan, baseline, policy),
    }
    findings = tuple(Finding(rule, text) for rule in RULES for text in results.get(rule, ()))
    return Verdict(path, tuple(rule for rule in RULES if rule in results), findings)


def _budget(plan: Plan) -> dict[str, list[str]]:
    peak, budget = plan.estimates.peak_memory_bytes, plan.estimates.memory_budget_bytes
    if peak <= budget:
        return {"over-budget": []}
    text = (
        f"needs {format_bytes(peak)} per device, {format_bytes(peak - budget)} more than the budget of "
        f"{format_bytes(budget)}; plan again for this cluster"
    )
    return {"over-budget": [text]}


def _stale(plan: Plan, here: Here) -> dict[str, list[str]]:
    found = []
    if here.cluster is not None and here.cluster != plan.cluster:
        parts = sorted(key for key in {*here.cluster, *plan.cluster} if here.cluster.get(key) != plan.cluster.get(key))
        found.append(f"made for another cluster: {', '.join(parts)} differ; plan again for this one")
    if here.torch is not None and public_version(here.torch) != public_version(plan.fingerprint.torch):
        found.append(
            f"made with torch {plan.fingerprint.torch}, and torch {here.torch} is installed; plan again with it"
        )
    return {} if here == Here() else {"stale": found}


def public_version(version: str) -> str:
    """Return a version without its build: `2.13.0` of `2.13.0+cpu`. A laptop's build plans for the cluster's."""
    return version.partition("+")[0]


def _limits(plan: Plan, policy: Policy) -> dict[str, list[str]]:
    estimates = plan.estimates
    most: tuple[tuple[str, str, float, float | None, Callable[[float], str]], ...] = (
        ("step-time-limit", "step time", estimates.step_time_s, policy.step_time_s, format_seconds),
        ("peak-memory-limit", "peak memory", estimates.peak_memory_bytes, policy.peak_memory_bytes, format_bytes),
        (
            "communication-limit",
            "communication",
            estimates.communication_bytes,
            policy.communication_bytes,
            format_bytes,
        ),
        ("gap-limit", "gap", plan.solver.gap, policy.max_gap, _percent),
    )
    results: dict[str, list[str]] = {}
    for rule, name, value, limit, show in most:
        if limit is not None:
            results[rule] = [f"{name} is {show(value)}, the policy allows {show(limit)}"] if value > limit else []
    if policy.min_mfu is not None:
        low = estimates.mfu < policy.min_mfu
        results["mfu-limit"] = [f"MFU is {estimates.mfu:.1%}, the policy asks for {policy.min_mfu:.1%}"] if low else []
    if policy.forbid_warnings:
        results["warning"] = [
            f"{each.text}{f' ({each.location})' if each.location else ''} [{each.code}]"
            for each in plan.warnings
            if each.code in policy.forbid_warnings or "*" in policy.forbid_warnings
        ]
    return results


def _percent(share: float) -> str:
    return f"{share:.2%}"


def _regressions(plan: Plan, baseline: Plan | None, policy: Policy) -> dict[str, list[str]]:
    if baseline is None:
        return {}
    new, old = plan.estimates, baseline.estimates
    figures: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("step_time", old.step_time_s, new.step_time_s, format_seconds),
        ("peak_memory", old.peak_memory_bytes, new.peak_memory_bytes, format_bytes),
        ("communication", old.communication_bytes, new.communication_bytes, format_bytes),
    )
    results = {"other-workload": _other_workload(plan, baseline)}
    if results["other-workload"]:
        return results
    for name, before, after, show in figures:
        allowed = policy.tolerance.get(name, DEFAULT_TOLERANCE)
        text = (
            f"{name.replace('_', ' ')} {show(before)} -> {show(after)} ({format_change(before, after)}, "
            f"allowed +{allowed:.1%})"
        )
        results[f"{name.replace('_', '-')}-regression"] = [text] if after > before * (1 + allowed) else []
    return results


def _other_workload(plan: Plan, baseline: Plan) -> list[str]:
    new, old = plan.workload, baseline.workload
    facts: tuple[tuple[str, object, object], ...] = (
        ("model", old.model, old.model if _is_one_model(plan, baseline) else new.model),
        ("global batch", old.global_batch, new.global_batch),
        ("tokens of a step", old.tokens_per_step, new.tokens_per_step),
        ("settings", _settings(old.settings), _settings(new.settings)),
    )
    differ = [f"{name} {a or 'unknown'} -> {b or 'unknown'}" for name, a, b in facts if a != b]
    text = (
        f"the baseline is for other work ({', '.join(differ)}), whose figures say nothing of this plan's; make a "
        "baseline for this work"
    )
    return [text] if differ else []


def _settings(given: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in given.items()) or "none"


def _is_one_model(plan: Plan, baseline: Plan) -> bool:
    """Return whether both are of one program, or of one file's function that is named from two folders."""
    one, other = (f"/{each.workload.model}" for each in (plan, baseline))
    return plan.fingerprint.graph == baseline.fingerprint.graph or one.endswith(other) or other.endswith(one)


def load_policy(path: Path) -> Policy:
    """Return the policy in a TOML file with the tables `limits`, `tolerance` and `warnings`.

        [limits]
        step_time_s = 0.5
        peak_memory_bytes = 70_000_000_000
        communication_bytes = 10_000_000_000
        min_mfu = 0.4
        max_gap = 0.02
        [tolerance]           # shares, against --baseline
        step_time = 0.05
        peak_memory = 0.02
        communication = 0.02
        [warnings]
        forbid = ["replicated"]

    Raises:
        UsageError: the file cannot be read, is no TOML, or holds a key or value that is none of these.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the policy {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    for key in document:
        if key not in _TABLES:
            raise _unknown_policy_key(path, key, tuple(_TABLES))
    limits = dict(_numbers(path, document, "limits", _LIMITS))
    tolerance = dict(_numbers(path, document, "tolerance", _COMPARED))
    return Policy(**limits, tolerance=tolerance, forbid_warnings=_codes(path, document))


_TABLES = ("limits", "tolerance", "warnings")


def _table(path: Path, document: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: {name} must be a table, such as [{name}]")
    for key in table:
        if key not in known:
            raise _unknown_policy_key(path, f"{name}.{key}", tuple(f"{name}.{each}" for each in known))
    return table


def _numbers(path: Path, document: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for key, value in _table(path, document, name, known).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"{path}: {name}.{key} must be a number of at least 0, and is {value!r}")
        yield key, float(value)


def _codes(path: Path, document: Mapping[str, Any]) -> tuple[str, ...]:
    codes = _table(path, document, "warnings", ("forbid",)).get("forbid", [])
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        raise UsageError(f"{path}: warnings.forbid must be a list of texts, such as ['replicated'] or ['*']")
    return tuple(codes)


def _unknown_policy_key(path: Path, key: str, known: tuple[str, ...]) -> UsageError:
    return UsageError(f"{path}: unknown key {key!r}{did_you_mean(key, known)}; keys are {', '.join(known)}")
