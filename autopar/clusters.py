"""`autopar.ClusterSpec`: the cost models' cluster, whose errors are autopar's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from autopar.errors import UsageError
from cost_models import cluster
from cost_models.errors import CostModelError

__all__ = ["ClusterSpec"]


class ClusterSpec(cluster.ClusterSpec):
    """Groups of nodes in rank order, and the network between the nodes.

    What cannot be read, or is no cluster, is a `UsageError` with the place in the file and the ways to write it.
    """

    @classmethod
    def parse(cls, text_or_path: str | Path) -> Self:
        """Return the cluster that a YAML path, preset or shorthand (`cpu:4`, `h100-sxm-80gb:8x4`) stands for."""
        with _told():
            return super().parse(text_or_path)

    @classmethod
    def from_file(cls, path: str | Path, *, calibrate: bool = True) -> Self:
        """Return the cluster of a YAML or JSON file, with the figures of the calibration file that it names.

        Without `calibrate`, that is not looked at.
        """
        with _told():
            return super().from_file(path, calibrate=calibrate)

    @classmethod
    def from_dict(cls, document: object, origin: str = "cluster") -> Self:
        """Return the cluster of a document in the cluster file's format."""
        with _told():
            return super().from_dict(document, origin)

    @classmethod
    def detect(cls, cpu_ranks: int | None = None) -> Self:
        """Return this machine: its NVIDIA devices if nvidia-smi lists any, else `cpu_ranks` or its cores on the CPU."""
        with _told():
            return super().detect(cpu_ranks)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except CostModelError as error:
        raise UsageError(str(error)) from None
