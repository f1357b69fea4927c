"""What stands in a model's return value for an output that this rank does not have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch

from autopar.errors import AutoparError


class OutputDroppedError(AutoparError):
    """An output is read that the plan does not keep over the micro-batches of a step."""


class OutputElsewhereError(AutoparError, TypeError):
    """An output is read on a rank that does not have it.

    A TypeError, too, for code that looks whether a value is a tensor or can be gone through, as transformers' does.
    """


class StandIn(ABC):
    """Raises when something is done with it, and says which output it is and how to get it."""

    @abstractmethod
    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise what says which output it is and how to get it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols ask for what is not there
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for each in (*args, *(kwargs or {}).values()):
            for one in each if isinstance(each, list | tuple) else (each,):
                if isinstance(one, StandIn):
                    one._refuse()
        raise OutputDroppedError("an output that this rank does not have was given to torch")

    def __getitem__(self, *_: Any) -> NoReturn:
        self._refuse()

    __iter__ = __len__ = __array__ = __float__ = __int__ = __bool__ = __getitem__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __getitem__
    __matmul__ = __rmatmul__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__


class Dropped(StandIn):
    """Stands for an output that a step of several micro-batches does not keep."""

    def __init__(self, name: str, microbatches: int) -> None:
        """Stand for the output `name` of a step of so many micro-batches."""
        self._name, self._microbatches = name, microbatches

    def __repr__(self) -> str:
        return f"<{self._name}: not kept over {self._microbatches} micro-batches>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OutputDroppedError(
            f"the output {self._name} is not kept over the {self._microbatches} micro-batches of a step (no room "
            "beside them, or --drop-outputs). Plan with keep_outputs=True (--keep-outputs), compute what is needed of "
            "it inside forward, or call the model under torch.no_grad(), where outputs are kept"
        )


class Elsewhere(StandIn):
    """Stands for an output of a stage that other ranks have; its shape and type are known here."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, ranks: tuple[int, ...]) -> None:
        """Stand for the output `name`, which these ranks have."""
        self._name, self._ranks = name, ranks
        self.shape, self.dtype, self.ndim = torch.Size(shape), dtype, len(shape)

    def __repr__(self) -> str:
        return f"<{self._name}: {list(self.shape)} on {self._where}>"

    @property
    def _where(self) -> str:
        return f"rank{'s' if len(self._ranks) > 1 else ''} {', '.join(map(str, self._ranks))}"

    def detach(self) -> Elsewhere:
        """Return this: what stands for a tensor has no gradient."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OutputElsewhereError(
            f"the output {self._name} is made by a pipeline stage that this rank does not have; it is on "
            f"{self._where}. Read it there only, or compile with outputs='whole', which returns all outputs as plain "
            "tensors on all ranks"
        )
