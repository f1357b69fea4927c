"""Comparing and judging plans."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.report import verdict as verdicts
from autopar.report.check import RULES, Here, Policy, check, load_policy
from autopar.report.diff import diff_text, differences
from autopar.report.explain import explain

Golden = Callable[[str, str], None]


def test_a_plan_does_not_differ_from_itself(small_plan: Plan):
    assert differences(small_plan, small_plan) == ()
    assert diff_text(()) == "the plans are the same\n"


def test_differences_of_a_slower_plan(small_plan: Plan, slower_plan: Plan, golden: Golden):
    golden("diff.txt", diff_text(differences(small_plan, slower_plan)))


def test_many_differences_of_a_kind_are_counted(small_plan: Plan):
    decided = small_plan.decisions
    one, other = decided.parameters.values()
    many = {f"p{i}": one for i in range(50)}
    plans = [
        replace(small_plan, decisions=replace(decided, parameters=each)) for each in (many, dict.fromkeys(many, other))
    ]

    lines = diff_text(differences(*plans)).splitlines()

    assert len(lines) == 41
    assert lines[-1] == "parameter: 10 more differ"


def test_explanations_of_the_plan_and_its_parts(small_plan: Plan, golden: Golden):
    texts = [explain(small_plan, node) for node in (None, "up.weight", "loss", "layers.0")]

    golden("explain.txt", "\n----\n".join(texts))


def test_an_unknown_node_is_told(small_plan: Plan):
    with pytest.raises(UsageError, match=r"the plan has no parameter, operator or module 'up.wieght' \(did you mean"):
        explain(small_plan, "up.wieght")


def test_a_name_without_its_beginning_is_completed(small_plan: Plan):
    with pytest.raises(UsageError, match=r"module 'weight' \(did you mean '\w+\.weight'\?\)"):
        explain(small_plan, "weight")


def test_a_plan_is_no_regression_of_itself(small_plan: Plan):
    found = check(small_plan, "p.json", baseline=small_plan, here=Here(small_plan.cluster, "2.13.0+cu130"))

    assert found.findings == ()
    assert {"over-budget", "stale", "step-time-regression"} <= set(found.checked)


def _texts(plan: Plan, **more: object) -> dict[str, str]:
    return {each.rule: each.text for each in check(plan, "p.json", **more).findings}


def test_regressions_are_found_with_their_figures(small_plan: Plan, slower_plan: Plan):
    assert _texts(slower_plan, baseline=small_plan) == {
        "step-time-regression": "step time 200 us -> 240 us (+20.0%, allowed +2.0%)",
        "peak-memory-regression": "peak memory 3.00 MiB -> 4.00 MiB (+33.3%, allowed +2.0%)",
        "communication-regression": "communication 44.00 KiB -> 88.00 KiB (+100.0%, allowed +2.0%)",
    }


def test_a_baseline_of_other_work_is_told(small_plan: Plan):
    workload = small_plan.workload
    other = replace(
        small_plan,
        workload=replace(workload, global_batch=3 * workload.global_batch, tokens_per_step=96),
        estimates=replace(small_plan.estimates, communication_bytes=10 * small_plan.estimates.communication_bytes),
    )

    assert _texts(other, baseline=small_plan) == {
        "other-workload": f"the baseline is for other work (global batch {workload.global_batch} -> "
        f"{3 * workload.global_batch}, tokens of a step {workload.tokens_per_step or 'unknown'} -> 96), whose figures "
        "say nothing of this plan's; make a baseline for this work"
    }


@pytest.mark.parametrize(("model", "is_same"), [("/ci/work/net.py:make", True), ("other/subnet.py:make", False)])
def test_a_file_named_from_two_folders_is_one_model(small_plan: Plan, model: str, is_same: bool):
    changed = replace(small_plan.fingerprint, graph="changed")
    named = [
        replace(small_plan, workload=replace(small_plan.workload, model=each), fingerprint=fingerprint)
        for each, fingerprint in (("net.py:make", small_plan.fingerprint), (model, changed))
    ]

    assert ("other-workload" not in _texts(named[1], baseline=named[0])) is is_same
    assert "other-workload" not in _texts(replace(named[1], fingerprint=small_plan.fingerprint), baseline=named[0])


def test_a_policy_tolerates_what_it_allows(small_plan: Plan, slower_plan: Plan):
    policy = Policy(tolerance={"step_time": 0.25, "peak_memory": 0.5, "communication": 1.0})

    assert _texts(slower_plan, baseline=small_plan, policy=policy) == {}


def test_a_plan_over_budget_is_found(small_plan: Plan):
    over = replace(small_plan, estimates=replace(small_plan.estimates, memory_budget_bytes=2 * 2**20))

    assert _texts(over) == {
        "over-budget": "needs 3.00 MiB per device, 1.00 MiB more than the budget of 2.00 MiB; "
        "plan again for this cluster"
    }


def test_a_stale_plan_is_found(small_plan: Plan):
    other = {**small_plan.cluster, "name": "other"}

    assert _texts(small_plan, here=Here(cluster=other)) == {
        "stale": "made for another cluster: name differ; plan again for this one"
    }
    assert _texts(small_plan, here=Here(torch="2.14.0")) == {
        "stale": "made with torch 2.13.0, and torch 2.14.0 is installed; plan again with it"
    }


def test_limits_of_a_policy_are_held(small_plan: Plan, tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(
        "[limits]\nstep_time_s = 0.0001\npeak_memory_bytes = 1_048_576\ncommunication_bytes = 0\nmin_mfu = 0.4\n"
        'max_gap = 0.001\n[warnings]\nforbid = ["replicated"]\n'
    )

    assert _texts(small_plan, policy=load_policy(path)) == {
        "step-time-limit": "step time is 200 us, the policy allows 100 us",
        "peak-memory-limit": "peak memory is 3.00 MiB, the policy allows 1.00 MiB",
        "communication-limit": "communication is 44.00 KiB, the policy allows 0 B",
        "mfu-limit": "MFU is 25.0%, the policy asks for 40.0%",
        "gap-limit": "gap is 0.50%, the policy allows 0.10%",
        "warning": "aten.foo has no sharding rule (mlp.py:14) [replicated]",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limit]", "unknown key 'limit' (did you mean 'limits'?); keys are limits, tolerance, warnings"),
        ("[limits]\nstep_time = 1", "unknown key 'limits.step_time' (did you mean 'limits.step_time_s'?)"),
        ("[limits]\nmin_mfu = '40%'", "limits.min_mfu must be a number of at least 0, and is '40%'"),
        ("[tolerance]\nstep_time = -1", "tolerance.step_time must be a number of at least 0, and is -1"),
        ("limits = 3", "limits must be a table, such as [limits]"),
        ("[warnings]\nforbid = 'all'", "warnings.forbid must be a list of texts"),
        ("[limits", "is no TOML: "),
    ],
)
def test_a_wrong_policy_is_told(text: str, message: str, tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(text)

    with pytest.raises(UsageError, match=re.escape(message)):
        load_policy(path)


def test_text_and_github_name_file_and_rule(small_plan: Plan, slower_plan: Plan):
    bad, good = check(slower_plan, "p.json", baseline=small_plan), check(small_plan, "p.json")

    assert verdicts.as_text(good) == "p.json: 1 checks passed (over-budget)\n"
    assert verdicts.as_text(bad).startswith("p.json: step-time-regression: step time 200 us")
    assert verdicts.as_github(good) == ""
    assert verdicts.as_github(bad).splitlines()[0] == (
        "::error file=p.json,title=autopar step-time-regression::step time 200 us -> 240 us (+20.0%25, allowed +2.0%25)"
    )


def test_json_says_whether_it_passed(small_plan: Plan, slower_plan: Plan):
    document = json.loads(verdicts.as_json(check(slower_plan, "p.json", baseline=small_plan)))

    assert document["passed"] is False
    assert [each["rule"] for each in document["findings"]] == [
        "step-time-regression", "peak-memory-regression", "communication-regression",
    ]  # fmt: skip


def test_junit_has_a_case_a_checked_rule(small_plan: Plan, slower_plan: Plan):
    found = check(slower_plan, "a<b.json", baseline=small_plan)
    suite = ET.fromstring(verdicts.as_junit(found))  # noqa: S314 - our own text

    assert (suite.get("tests"), suite.get("failures")) == ("5", "3")
    assert [case.get("name") for case in suite if case.find("failure") is None] == ["over-budget", "other-workload"]
    assert {case.get("classname") for case in suite} == {"a<b.json"}


def test_sarif_results_refer_to_its_rules(small_plan: Plan, slower_plan: Plan):
    document = json.loads(verdicts.as_sarif(check(slower_plan, "p.json", baseline=small_plan)))
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]

    assert document["version"] == "2.1.0"
    assert len(run["results"]) == 3
    assert {each["ruleId"] for each in run["results"]} <= set(rules) <= set(RULES)
