"""Which placements an operator admits, one mesh axis at a time; `compose` takes the product over axes."""

from autopar.strategies.axis import AxisStrategies, axis_strategies, fits
from autopar.strategies.nesting import fits_mesh

__all__ = ["AxisStrategies", "axis_strategies", "fits", "fits_mesh"]
