"""Shape and type of a tensor, without its values and without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes of one element by dtype name (torch's names without the `torch.`)."""

FLOATING = frozenset(name for name in ITEM_BYTES if "float" in name)
"""Real floating dtypes: what a gradient can have."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Static shape and dtype of one tensor; the shape is global unless said otherwise."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's dtype name without the prefix: `float32`, `int64`, `bool`."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, without padding."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Return whether values are real floating numbers, so that sums of shards make sense."""
        return self.dtype in FLOATING

    @property
    def is_continuous(self) -> bool:
        """Return whether values are real or complex floating numbers, so that they may be held as terms of a sum."""
        return self.is_floating or self.dtype.startswith("complex")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
