"""The result of a check in the forms that CI systems read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import quoteattr

from autopar.report.check import RULES, Verdict
from autopar.version import __version__


def as_text(verdict: Verdict) -> str:
    """Return a line a finding, or one that says what was checked."""
    if not verdict.findings:
        return f"{verdict.path}: {len(verdict.checked)} checks passed ({', '.join(verdict.checked)})\n"
    return "".join(f"{verdict.path}: {each.rule}: {each.text}\n" for each in verdict.findings)


def as_json(verdict: Verdict) -> str:
    """Return `{plan, passed, checked, findings: [{rule, text}]}`."""
    findings = [{"rule": each.rule, "text": each.text} for each in verdict.findings]
    document = {
        "plan": verdict.path,
        "passed": not verdict.findings,
        "checked": list(verdict.checked),
        "findings": findings,
    }
    return _json(document)


def as_github(verdict: Verdict) -> str:
    """Return GitHub's workflow commands, which become annotations of the plan file."""

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return escaped(text).replace(":", "%3A").replace(",", "%2C")

    return "".join(
        f"::error file={value(verdict.path)},title={value(f'autopar {each.rule}')}::{escaped(each.text)}\n"
        for each in verdict.findings
    )


def as_junit(verdict: Verdict) -> str:
    """Return JUnit XML: a test case a rule checked."""
    broken = {rule: "\n".join(each.text for each in verdict.findings if each.rule == rule) for rule in verdict.checked}
    failures = sum(bool(text) for text in broken.values())
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name="autopar check" tests="{len(broken)}" failures="{failures}">',
    ]
    for rule, text in broken.items():
        head = f"  <testcase classname={quoteattr(verdict.path)} name={quoteattr(rule)}"
        lines.append(f"{head}><failure message={quoteattr(text)}/></testcase>" if text else f"{head}/>")
    return "\n".join([*lines, "</testsuite>", ""])


def as_sarif(verdict: Verdict) -> str:
    """Return SARIF 2.1.0."""
    rules = [{"id": rule, "shortDescription": {"text": RULES[rule]}} for rule in verdict.checked]
    results = [
        {
            "ruleId": each.rule,
            "level": "error",
            "message": {"text": each.text},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": verdict.path}}}],
        }
        for each in verdict.findings
    ]
    driver = {"name": "autopar", "version": __version__, "rules": rules}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return _json(document)


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


FORMATS: Mapping[str, Callable[[Verdict], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "junit": as_junit,
    "sarif": as_sarif,
}
"""What `autopar check --format` may name."""
