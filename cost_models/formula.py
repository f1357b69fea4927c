"""A formula written once: printed by `explain`, evaluated over numpy arrays.

sympy takes about half a second to import, so it is imported when a formula is
first evaluated or its `expression` read, not before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError, suggestion

Number = float | npt.NDArray[Any]


@dataclass(frozen=True)
class Formula:
    """One formula with its legend and where it comes from."""

    name: str
    text: str
    """The formula as in the source, readable by sympy."""

    symbols: tuple[tuple[str, str], ...]
    """Each symbol with its meaning and unit, in the order of evaluation."""

    source: str

    @property
    def expression(self) -> Any:
        """Return the sympy expression."""
        return _expression(self.text, self.symbol_names)

    @property
    def symbol_names(self) -> tuple[str, ...]:
        """Return the symbols in the order of the legend."""
        return tuple(name for name, _ in self.symbols)

    def evaluate(self, **numbers: Number) -> npt.NDArray[np.float64]:
        """Return the value in SI units for numbers or arrays that broadcast together.

        Raises `CostModelError` where a symbol is missing or unknown.
        """
        function, names = self._compiled
        if numbers.keys() != names.keys():
            raise _wrong_symbols(self, numbers)
        arrays = [np.asarray(numbers[name], dtype=np.float64) for name in names]
        shape = np.broadcast(*arrays).shape
        result = np.asarray(function(*arrays), dtype=np.float64)
        # A formula that does not use every symbol still has a value for each of their numbers.
        return result if result.shape == shape else np.broadcast_to(result, shape)

    @cached_property
    def _compiled(self) -> tuple[Callable[..., Any], Mapping[str, None]]:
        """Return the formula as a function of arrays, and the names of its arguments in order."""
        names = self.symbol_names
        return _lambdified(self.text, names), dict.fromkeys(names)

    def legend(self) -> str:
        """Return one line a symbol: `n  bytes of the full tensor`."""
        width = max(len(name) for name, _ in self.symbols)
        return "\n".join(f"{name:<{width}}  {meaning}" for name, meaning in self.symbols)

    def __str__(self) -> str:
        """Return `name = formula`."""
        return f"{self.name} = {self.text}"


def registry(*formulas: Formula) -> Mapping[str, Formula]:
    """Return `formulas` by name."""
    return {each.name: each for each in formulas}


def _wrong_symbols(formula: Formula, given: Iterable[str]) -> CostModelError:
    names = formula.symbol_names
    unknown = sorted(set(given) - set(names))
    missing = [name for name in names if name not in set(given)]
    parts = [f"no value for {', '.join(missing)}"] if missing else []
    parts += [f"no symbol {name!r}{suggestion(name, names)}" for name in unknown]
    return CostModelError(f"formula {formula}: {'; '.join(parts)}")


@cache
def _expression(text: str, names: tuple[str, ...]) -> Any:
    import sympy  # slow to import, see the module's docstring

    symbols = {name: sympy.Symbol(name, nonnegative=True) for name in names}
    return sympy.sympify(text, locals=symbols)


@cache
def _lambdified(text: str, names: tuple[str, ...]) -> Callable[..., Any]:
    import sympy

    symbols = [sympy.Symbol(name, nonnegative=True) for name in names]
    function: Callable[..., Any] = sympy.lambdify(symbols, _expression(text, names), "numpy")
    return function
