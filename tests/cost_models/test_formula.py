"""A formula's value has the form of all its numbers together."""

import numpy as np
import pytest

from cost_models.errors import CostModelError
from cost_models.formula import Formula

SUM = Formula("sum", "a + 2*b", (("a", "one number"), ("b", "another"), ("c", "one that is not used")), "this test")


def test_numbers_and_arrays_broadcast_even_where_a_symbol_is_not_used():
    found = SUM.evaluate(b=np.array([[1], [2]]), a=np.array([10, 20, 30]), c=0)

    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [[12, 22, 32], [14, 24, 34]])
    np.testing.assert_array_equal(SUM.evaluate(a=1, b=2, c=np.zeros(3)), [5, 5, 5])
    assert SUM.evaluate(a=1, b=2, c=3).shape == ()


def test_a_value_may_not_be_written_into_where_it_repeats():
    with pytest.raises(ValueError, match="read-only"):
        SUM.evaluate(a=1, b=2, c=np.zeros(3))[0] = 1


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"a": 1}, "formula sum = a + 2*b: no value for b, c"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "formula sum = a + 2*b: no symbol 'd'"),
    ],
)
def test_symbols_that_are_missing_or_unknown_are_named(numbers: dict[str, float], text: str):
    with pytest.raises(CostModelError) as caught:
        SUM.evaluate(**numbers)

    assert text in str(caught.value)
