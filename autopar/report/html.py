"""A plan as one self-contained page."""

from __future__ import annotations

from importlib import resources

import jinja2

from autopar.figures import format_bytes, format_degrees, format_seconds
from autopar.ir.plan import Plan
from autopar.report.outline import MEMORY_PARTS, costly_operators, layout_text, parameter_groups, summary, time_parts


def html(plan: Plan) -> str:
    """Return the page: summary, time, memory, parameters, operators, collectives, alternatives, warnings, sources."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        seconds=format_seconds, bytes=format_bytes, degrees=format_degrees, layout=layout_text, percent=_percent
    )
    source = resources.files("autopar.report").joinpath("plan.html.jinja").read_text(encoding="utf-8")
    estimates = plan.estimates
    return environment.from_string(source).render(
        plan=plan,
        summary=summary(plan),
        time=time_parts(estimates.breakdown),
        memory=[(name, getattr(estimates.memory, name)) for name in MEMORY_PARTS],
        parameters=parameter_groups(plan),
        operators=costly_operators(plan),
        collectives=sorted(plan.decisions.collectives, key=lambda each: -each.predicted_s),
    )


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
