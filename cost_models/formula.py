"""A formula written once: printed by `explain`, evaluated over numpy arrays.

sympy takes about half a second to import, so it is imported when a formula is
first evaluated or its `expression` read, not before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
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
        names = self.symbol_names
        unknown = sorted(set(numbers) - set(names))
        missing = [name for name in names if name not in numbers]
        if unknown or missing:
            raise _wrong_symbols(self, unknown, missing)
        arrays = np.broadcast_arrays(*(np.asarray(numbers[n], dtype=np.float64) for n in names))
        result = np.asarray(_lambdified(self.text, names)(*arrays), dtype=np.float64)
        return np.broadcast_to(result, arrays[0].shape)

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


def _wrong_symbols(formula: Formula, unknown: list[str], missing: list[str]) -> CostModelError:
    parts = [f"no value for {', '.join(missing)}"] if missing else []
    parts += [f"no symbol {name!r}{suggestion(name, formula.symbol_names)}" for name in unknown]
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
