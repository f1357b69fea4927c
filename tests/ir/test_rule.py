"""Rules as text: what each letter, field and shape makes of them."""

from __future__ import annotations

import pytest

from autopar.ir.placement import Shard
from autopar.ir.rule import Rule


def offered(rule: Rule, size: int = 2, *shapes: tuple[int, ...], **options: object) -> list[str]:
    """Return the strategies of a rule as text."""
    return [str(each) for each in rule.strategies(size, shapes, **options)]  # type: ignore[arg-type]


def test_matrix_product_splits_each_factor_once() -> None:
    found = offered(Rule.parse("mk kn -> mn"), 2, (4, 8), (8, 6))

    assert found == ["R,R->R", "S0,R->S0", "S1,S0->P", "R,S1->S1"]


def test_whole_factors_are_not_split() -> None:
    assert offered(Rule.parse("mh -> mh", whole="h"), 2, (4, 8)) == ["R->R", "S0->S0"]


def test_reduction_names_how_terms_join() -> None:
    assert offered(Rule.parse("mk -> m", reduce="max"), 2, (4, 8)) == ["R->R", "S0->S0", "S1->Pmax"]


def test_without_reduction_only_kept_factors_split() -> None:
    assert offered(Rule.parse("mk -> m", reduce=None), 2, (4, 8)) == ["R->R", "S0->S0"]


def test_what_is_added_is_a_term_where_the_product_is() -> None:
    found = offered(Rule.parse("n mk kn -> mn", added=[0]), 2, (6,), (4, 8), (8, 6))

    assert found == ["R,R,R->R", "S0,R,S1->S1", "R,S0,R->S0", "P,S1,S0->P"]


def test_linear_rules_make_terms_of_terms() -> None:
    assert offered(Rule.parse("a a -> a", linear=True), 2, (4,), (4,)) == ["R,R->R", "S0,S0->S0", "P,P->P"]
    assert offered(Rule.parse("a a -> a", linear=[[0], [1]]), 2, (3,), (3,)) == ["R,R->R", "P,R->P", "R,P->P"]


def test_merged_dimension_splits_by_each_of_its_factors() -> None:
    found = offered(Rule.parse("(ij)k -> ijk"), 2, (8, 3), results=[(4, 2, 3)])

    assert found == ["R->R", "S0->S0", "S0/4->S1"]


def test_merged_factor_that_does_not_divide_is_not_split() -> None:
    found = offered(Rule.parse("(ij) -> ij"), 2, (6,), results=[(3, 2)])

    assert found == ["R->R", "S0/3->S1"]


def test_hinted_runs_are_carried_through() -> None:
    found = offered(Rule.parse("mk kn -> mn"), 2, (8, 3), (3, 5), hints=[{Shard(0, 4)}, ()])

    assert found == ["R,R->R", "S0,R->S0", "S0/4,R->S0/4"]


def test_wanted_runs_are_made() -> None:
    found = offered(Rule.parse("mk kn -> mn"), 2, (3, 3), (3, 12), wanted=[{Shard(1, 3)}])

    assert found == ["R,R->R", "R,S1->S1", "R,S1/3->S1/3"]


def test_factor_twice_in_one_tensor_is_not_split() -> None:
    assert offered(Rule.parse("aab -> b"), 2, (4, 4, 4)) == ["R->R", "S2->S0"]


@pytest.mark.parametrize("text", ["mk kn", "m+k -> m", "m(k -> m"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no (rule|list of dimensions)"):
        Rule.parse(text)
