"""Scans over a sequence that libraries have kernels for: what each reads and makes, by factors of its dimensions.

    gated_delta_rule    query [b, s, g, d]   value [b, s, g r, e]   decay, beta [b, s, g r]   ->   [b, s, g r, e]

Of every factor but the ones named whole a part can be computed without the rest: samples, heads, columns of the state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from autopar.ir.rule import Rule

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Scan:
    """One kind of scan: the functions of libraries that compute it, and the dimensions of their tensors."""

    functions: frozenset[str]
    """Names that functions with these arguments go by."""

    reads: Mapping[str, tuple[str, ...]]
    """Of each argument that is a tensor its dimensions, as `Rule.parse` reads them, by each rank it may have."""

    makes: str
    """The dimensions of the output."""

    whole: str
    """Factors that are never split: steps, and what a state is made of with each of them."""

    states: frozenset[str]
    """Arguments that ask for the last state beside the output."""

    beside: int = 0
    """How many things the function returns behind the output where no state is asked for; all of them `None`."""

    called: Mapping[str, str] = field(default_factory=dict)
    """Arguments that some library names otherwise."""

    def dims(self, name: str, rank: int) -> str | None:
        """Return the dimensions of an argument; `None` if it is none of this scan, or has another rank."""
        for text in self.reads.get(self.called.get(name, name), ()):
            if len(Rule.parse(f"{text} -> -").inputs[0]) == rank:
                return text
        return None


SCANS: Mapping[str, Scan] = {
    # Yang et al. 2024, "Gated Delta Networks", equation 10; flash-linear-attention's and transformers' function.
    "gated_delta_rule": Scan(
        functions=frozenset({"chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"}),
        reads={
            "query": ("bsgd",),
            "key": ("bsgd",),
            "value": ("bs(gr)e",),
            "g": ("bs(gr)",),
            "beta": ("bs(gr)",),
            "initial_state": ("b(gr)de",),
        },
        makes="bs(gr)e",
        whole="sd",
        states=frozenset({"output_final_state"}),
        beside=1,
        called={"q": "query", "k": "key", "v": "value"},
    ),
    # Kimi Team 2025, "Kimi Linear", section 3: a decay for each feature of a key; the same libraries' function.
    "kimi_delta_rule": Scan(
        functions=frozenset({"chunk_kda", "chunk_kimi_delta_attention"}),
        reads={
            "query": ("bsgd",),
            "key": ("bsgd",),
            "value": ("bsge",),
            "g": ("bsgd",),
            "beta": ("bsg",),
            "initial_state": ("bgde",),
        },
        makes="bsge",
        whole="sd",
        states=frozenset({"output_final_state"}),
        beside=1,
        called={"q": "query", "k": "key", "v": "value"},
    ),
    # Gu and Dao 2023, "Mamba", algorithm 2; mamba_ssm's and transformers' function.
    "selective_scan": Scan(
        functions=frozenset({"selective_scan_fn", "mamba_selective_scan"}),
        reads={
            "u": ("bds",),
            "delta": ("bds",),
            "A": ("dn",),
            "B": ("bns",),
            "C": ("bns",),
            "D": ("d",),
            "z": ("bds",),
            "delta_bias": ("d",),
        },
        makes="bds",
        whole="sn",
        states=frozenset({"return_last_state"}),
        called={"hidden_states": "u", "dt": "delta"},
    ),
    # The convolution in front of such scans, over the last few steps; causal-conv1d's and transformers' function.
    "causal_convolution": Scan(
        functions=frozenset({"causal_conv1d_fn"}),
        reads={"x": ("bds",), "weight": ("dk",), "bias": ("d",)},
        makes="bds",
        whole="sk",
        states=frozenset({"return_final_states"}),
        called={"hidden_states": "x"},
    ),
    # Dao and Gu 2024, "Transformers are SSMs", section 6; mamba_ssm's and transformers' function.
    "chunk_scan": Scan(
        functions=frozenset({"mamba_chunk_scan_combined", "mamba2_chunk_scan"}),
        reads={
            "x": ("bs(gr)p",),
            "dt": ("bs(gr)",),
            "A": ("(gr)",),
            "B": ("bsgn",),
            "C": ("bsgn",),
            "D": ("(gr)", "(gr)p"),
            "z": ("bs(gr)p",),
            "dt_bias": ("(gr)",),
            "initial_states": ("b(gr)pn",),
        },
        makes="bs(gr)p",
        whole="sn",
        states=frozenset({"return_final_states"}),
        called={"hidden_states": "x"},
    ),
}


@dataclass(frozen=True)
class ScanCall:
    """One call of a scan, as its operator is told of it."""

    kind: str
    function: str
    """`module:name` of the function that computes it."""

    given: tuple[str, ...]
    """The function's own names of the tensors it is given."""

    ranks: tuple[int, ...]
    positional: tuple[str, ...]
    """Names of the arguments that the model gives by position: a kernel may call them otherwise."""

    settings: Mapping[str, Any]
    """Its other arguments: numbers, texts, truth values and tuples of them."""

    dtype: str
    """Of the output, as torch names it."""

    @property
    def text(self) -> str:
        """Return the call as one argument of an operator."""
        return json.dumps(
            [self.kind, self.function, self.given, self.ranks, self.positional, self.settings, self.dtype]
        )

    @staticmethod
    @lru_cache(maxsize=1024)
    def read(text: str) -> ScanCall:
        """Return the call that `text` tells of."""
        kind, function, given, ranks, positional, settings, dtype = json.loads(text)
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        return ScanCall(kind, function, tuple(given), tuple(ranks), tuple(positional), plain, dtype)

    def computed_in(self, dtype: str) -> ScanCall:
        """Return the call with another type of its output."""
        return replace(self, dtype=dtype)

    def arguments(self, reads: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what to call the function with, by position and by name."""
        named = dict(zip(self.given, reads, strict=True)) | dict(self.settings)
        return [named.pop(name) for name in self.positional], named

    @property
    def scan(self) -> Scan:
        """Return what is known of the kind."""
        return SCANS[self.kind]

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Return the dimensions of each tensor that is given."""
        found = [self.scan.dims(name, rank) for name, rank in zip(self.given, self.ranks, strict=True)]
        return tuple(each for each in found if each is not None)

    @cached_property
    def forward(self) -> Rule:
        """Return how the dimensions of what is read and made belong together."""
        return Rule.parse(f"{' '.join(self.dims)} -> {self.scan.makes}", whole=self.scan.whole)

    @cached_property
    def backward(self) -> Rule:
        """Return the same of the gradients: of the output and what forward read, to those of what it read."""
        read = " ".join(self.dims)
        return Rule.parse(f"{self.scan.makes} {read} -> {read}", whole=self.scan.whole, linear=[[0]])

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """Return the size of each factor, given the shapes of what is read."""
        return self.forward.sizes(shapes, ())

    def shape(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Return the shape of the output, given those of what is read."""
        sizes = self.sizes(shapes)
        (made,) = self.forward.outputs
        return tuple(math.prod(sizes[factor] for factor in dim) for dim in made or ())
