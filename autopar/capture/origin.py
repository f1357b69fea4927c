"""Where an operator comes from: the user's source line, the module that called it, forward or backward."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Phase

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PYTHON = str(Path(os.__file__).resolve().parent) + "/"
_HERE = str(Path(__file__).resolve().parent) + "/"
_TORCH = str(Path(torch.__file__).resolve().parent) + "/"
_HELPERS = re.compile(r"/(site|dist)-packages/(transformers/(?!models/)|(accelerate|torchvision/_|timm/layers)/?)")
_ACCUMULATION = "Gradient addition node"
_LAYER = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.|$)")


@lru_cache(maxsize=1 << 14)
def user_line(stack_trace: str) -> str:
    """Return `file.py:line` of the innermost frame in a model's own file; empty where the trace has none.

    Frames of torch and of this package never count; those of a model library's helpers only if nothing else is there.
    """
    frames = [(file, line) for file, line in _FRAME.findall(stack_trace) if not _is_inside(file)]
    own = [each for each in frames if not _is_helper(each[0])]
    for file, line in reversed(own or frames):
        return f"{_shown(file)}:{line}"
    return ""


@lru_cache(maxsize=1 << 10)
def _is_inside(file: str) -> bool:
    """Return whether a file is of torch or of this package, wherever links lead to it, or none."""
    return file.startswith("<") or str(Path(file).resolve()).startswith((_TORCH, _HERE))


@lru_cache(maxsize=1 << 10)
def _is_helper(file: str) -> bool:
    """Return whether a file is of Python's own library, or of a model library beside its model definitions."""
    library = file.startswith(_PYTHON) and "-packages/" not in file
    return library or _HELPERS.search(file) is not None


@lru_cache(maxsize=1 << 10)
def _shown(file: str) -> str:
    """Return the path below the working folder or the installed packages, else the whole."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in file:
            return file.rpartition(marker)[2]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def module_path(meta: Mapping[str, Any], modules: Collection[str], prefix: str) -> str | None:
    """Return the path of the innermost module in an fx node's stack; `None` without a stack.

    For an operator of the backward it is the module of the forward operator.
    """
    stack = meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack")
    if not stack:
        return None
    for path, _ in reversed(list(stack.values())):
        found = _module_name(path, prefix)
        if found in modules:
            return found
    return ""


@lru_cache(maxsize=1 << 14)
def _module_name(expression: str, prefix: str) -> str:
    """Return the dotted path that Dynamo spells as `L['self'].model.layers[0]`, or as `getattr(..., '0')`."""
    path, more = expression, 1
    while more:  # names that are no identifiers are asked for by `getattr`, which nests
        path, more = re.subn(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", path)
    path = path.removeprefix("L['self']")
    # Through the dictionary where a class has a `__getattr__` of its own, as those of diffusers do.
    path = re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    # Bodies of custom autograd functions keep the name that export gives the traced root.
    path = path.removeprefix(".").removeprefix("_export_root").removeprefix(".")
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else path


@lru_cache(maxsize=4096)
def layer_path(module: str) -> str:
    """Return the path of the layer that a module belongs to: its path up to the first number; empty if none."""
    match = _LAYER.match(module)
    return match.group(0) if match else ""


def is_accumulation(meta: Mapping[str, Any]) -> bool:
    """Return whether autograd put the operator there to add two gradients of one tensor."""
    return _ACCUMULATION in (meta.get("stack_trace") or "")


def phases(
    nodes: Sequence[fx.Node], tangents: Collection[fx.Node], results: Collection[fx.Node]
) -> dict[fx.Node, Phase]:
    """Return forward or backward for every node.

    What user outputs and new buffer values need is forward, whatever torch tagged it; what depends on a tangent is
    backward; for the rest torch's tag says which, and a reader of a backward node is backward.
    """
    needed: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    found: dict[fx.Node, Phase] = {}
    for node in nodes:
        behind = node in tangents or any(found[each] == "backward" for each in node.all_input_nodes)
        tagged = "backward" in str(node.meta.get("partitioner_tag", ""))
        found[node] = "backward" if node not in needed and (behind or tagged) else "forward"
    return found
