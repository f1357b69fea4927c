"""What stands in a model's return value for an output that the step did not keep."""

from __future__ import annotations

from typing import Any, NoReturn

from autopar.errors import AutoparError


class OutputDroppedError(AutoparError):
    """An output is read that the plan does not keep over the micro-batches of a step."""


class Dropped:
    """Raises when something is done with it, and says which output it is and how to get it."""

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols ask for what is not there
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for each in (*args, *(kwargs or {}).values()):
            for one in each if isinstance(each, list | tuple) else (each,):
                if isinstance(one, cls):
                    one._refuse()
        raise OutputDroppedError("an output that is not kept over micro-batches was given to torch")

    __getitem__ = __iter__ = __len__ = __array__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
