"""A plan as a graph to draw: graphviz text operator by operator, mermaid text module by module."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.figures import format_degrees, format_seconds
from autopar.ir.plan import OperatorDecision, Plan
from autopar.report.outline import edges, layout_text

_COMMUNICATION = "#c0392b"


def dot(plan: Plan) -> str:
    """Return graphviz text: operators with their layouts in a cluster a module, collectives on the edges in red."""
    lines = [
        "digraph plan {",
        f"  label={_quoted(f'{plan.workload.model}: {format_degrees(plan.decisions.degrees)}')};",
        '  node [shape=box, style=rounded, fontname="monospace", fontsize=10];',
        '  edge [fontname="monospace", fontsize=9];',
    ]
    by_module: dict[str, list[str]] = {}
    for name, each in plan.decisions.operators.items():
        by_module.setdefault(each.module, []).append(name)
    for i, (module, names) in enumerate(sorted(by_module.items())):
        lines += list(_cluster(plan, i, module, names)) if module else [_node(plan, name, "  ") for name in names]
    elsewhere = sorted({each.source for each in edges(plan) if not each.known})
    lines += [f"  {_quoted(name)} [label={_quoted(f'{name} (equal layer)')}, style=dashed];" for name in elsewhere]
    for edge in edges(plan):
        look = f" [label={_quoted(', '.join(edge.steps))}, color={_quoted(_COMMUNICATION)}]" if edge.steps else ""
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{look};")
    return "\n".join([*lines, "}", ""])


def mermaid(plan: Plan) -> str:
    """Return mermaid text: one box a module with its time, the collectives between modules on the edges."""
    operators = plan.decisions.operators
    modules = sorted({each.module for each in operators.values()})
    number = {module: f"m{i}" for i, module in enumerate(modules)}
    lines = ["flowchart TD"]
    for module in modules:
        inside = [each for each in operators.values() if each.module == module]
        seconds = sum(each.predicted_s * each.instances for each in inside)
        label = (
            f"{module or 'top'}<br>{len(inside)} operator{'s' if len(inside) > 1 else ''}, {format_seconds(seconds)}"
        )
        lines.append(f'  {number[module]}["{_html(label)}"]')
    between: dict[tuple[str, str], dict[str, None]] = {}
    for each in edges(plan):
        if each.known and operators[each.source].module != operators[each.target].module:
            pair = number[operators[each.source].module], number[operators[each.target].module]
            between.setdefault(pair, {}).update(dict.fromkeys(each.steps))
    for (source, target), steps in between.items():
        arrow = f'-->|"{_html(", ".join(steps))}"|' if steps else "-->"
        lines.append(f"  {source} {arrow} {target}")
    return "\n".join([*lines, ""])


def _cluster(plan: Plan, index: int, module: str, names: list[str]) -> Iterator[str]:
    yield f"  subgraph cluster_{index} {{"
    yield f"    label={_quoted(module)};"
    yield from (_node(plan, name, "    ") for name in names)
    yield "  }"


def _node(plan: Plan, name: str, indent: str) -> str:
    return f"{indent}{_quoted(name)} [label={_quoted(_label(name, plan.decisions.operators[name]))}];"


def _label(name: str, each: OperatorDecision) -> str:
    first = each.strategy.outputs[0] if each.strategy.outputs else None
    lines = [each.target if each.target != name else name]
    if each.output is not None:
        lines.append(str(each.output))
    lines.append(layout_text(first))
    if each.predicted_s:
        times = f" x {each.instances}" if each.instances > 1 else ""
        lines.append(f"{format_seconds(each.predicted_s)}{times}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _html(text: str) -> str:
    return text.replace('"', "#quot;")
