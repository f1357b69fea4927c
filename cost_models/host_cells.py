"""Cells that tell what of a step waits in the host's memory."""

from cost_models.cells import Cells, count_of, said
from cost_models.errors import CostModelError


def offloaded_of(row: Cells, layers: int, stages: int) -> int:
    """Return of how many layers, the first, activations wait in the host's memory for backward; 0: of none."""
    column = "activation_offload_layers"
    if not said(row, column):
        return 0
    found = count_of(row, column)
    if found > layers:
        raise CostModelError(f"{column} is {found} of {layers} layers")
    if stages > 1:
        raise CostModelError(f"{column} is {found}: activations in the host's memory are not priced on {stages} stages")
    return found
