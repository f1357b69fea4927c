"""Small models as people write them: plain torch.nn, each with something that other architectures have not.

Every factory takes the samples of a step and returns a model in training mode and its keyword arguments; forward
returns the loss, alone or in a dict.
"""

from __future__ import annotations

from benchmarks.own_models import (
    adapted,
    complete,
    generative,
    layers,
    metrics,
    newer,
    pictures,
    sequences,
    sets,
    sounds,
)
from benchmarks.own_models.parts import FACTORIES, Around, example

__all__ = [
    "FACTORIES",
    "Around",
    "adapted",
    "complete",
    "example",
    "generative",
    "layers",
    "metrics",
    "newer",
    "pictures",
    "sequences",
    "sets",
    "sounds",
]
