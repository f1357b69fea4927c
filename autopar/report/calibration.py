"""What a calibration found, as a table for the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from autopar.figures import format_figure

_WIDTH = 100

_AT_WORK = 0.8
"""Share of the cores that ranks should have had, below which something else is told of: hyperthreads give about 0.6."""


def calibration_text(calibration: Any) -> str:
    """Return the figures of a calibration: value, spread of the runs, error of the fit, samples."""
    from rich.console import Console
    from rich.table import Table

    table = Table("of", "figure", "value", "spread", "fit error", "samples", title=str(calibration.machine))
    for column in table.columns[2:]:
        column.justify = "right"
    for of, figure in _figures(calibration):
        value = format_figure(figure.value, figure.unit)
        table.add_row(of, figure.figure, value, f"{figure.spread:.1%}", f"{figure.error:.1%}", str(figure.samples))
    out = io.StringIO()
    Console(file=out, width=_WIDTH, no_color=True, markup=False, highlight=False).print(table)
    return out.getvalue()


def disturbed(calibration: Any, cores: int) -> str:
    """Return what is to be said of ranks that computed less at once than so many cores should; empty: nothing."""
    machine = calibration.machine
    ranks = machine.machine_devices
    could = min(ranks, cores)
    if not machine.cores or machine.cores >= _AT_WORK * could:
        return ""
    return (
        f"{ranks} ranks on {cores} cores computed {machine.cores:.2f} ranks' worth of products at once, not {could}: "
        "these cores are hyperthreads, or something else was running. In that case calibrate again on an idle machine; "
        "all figures of this calibration are too slow"
    )


def _figures(calibration: Any) -> Iterator[tuple[str, Any]]:
    for figure in calibration.device_figures:
        yield "device", figure
    for level in calibration.levels:
        for figure in level.figures:
            yield level.name, figure
