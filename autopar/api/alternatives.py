"""What a plan was weighed against, and why that lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from autopar.api.naming import name_axes, wished
from autopar.api.solved import Solved
from autopar.ir.plan import Alternative
from autopar.search.trials import ways_of


def alternatives(best: Solved, solved: Sequence[Solved], top_k: int, fixed: Collection[str]) -> tuple[Alternative, ...]:
    """Return the most promising trials that lost, and why."""
    others = sorted((one for one in solved if one is not best), key=lambda one: (one.step_s, one.solution.bound_s))
    return tuple(_alternative(one, best, fixed) for one in others[:top_k])


def _alternative(one: Solved, best: Solved, fixed: Collection[str]) -> Alternative:
    if one.outcome is None:
        return Alternative(
            degrees=_with_stages(wished(one.trial.mesh), one),
            step_time_s=None,
            peak_memory_bytes=None,
            why_not=_named(one, one.why_not),
        )
    _, degrees = name_axes(one.outcome, one.trial.mesh, fixed)
    slower = one.step_s / best.step_s - 1.0 if best.step_s else 0.0
    why = one.why_not or (f"{slower:.1%} slower" if slower > 0 else "as fast, found later")
    peak = one.outcome.memory().total if one.pipeline is None else one.pipeline.static.total
    return Alternative(
        degrees=_with_stages(degrees, one),
        step_time_s=one.step_s,
        peak_memory_bytes=peak,
        why_not=_named(one, why),
    )


def _with_stages(degrees: Mapping[str, int], one: Solved) -> Mapping[str, int]:
    return {**degrees, "pp": one.trial.depth} if one.trial.depth > 1 else degrees


def _named(one: Solved, why: str) -> str:
    """Return why a trial lost, with what its degrees do not say of it."""
    parts = []
    if one.trial.microbatches > 1:
        parts.append(f"{one.trial.microbatches} micro-batches")
    ways = Counter(ways_of(one.trial.recompute).values())
    if isinstance(one.trial.recompute, str):
        parts += [f"recompute {way}" for way in ways]
    else:
        parts += [f"recompute {way} in {count} block{'s' if count > 1 else ''}" for way, count in sorted(ways.items())]
    return f"{why} ({', '.join(parts)})" if parts else why
