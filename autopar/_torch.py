"""Every name of torch that is private or moves between versions, in one place (tested on 2.13, meant to work on 2.11)."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as dynamo_capture
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.graph_module import _assign_attr as assign_attribute
from torch.fx.graph_module import _del_attr as delete_attribute
from torch.overrides import TorchFunctionMode

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDynamoException",
    "TorchFunctionMode",
    "aot_export_joint_with_descriptors",
    "assign_attribute",
    "delete_attribute",
    "dynamo_capture",
    "dynamo_settings",
    "is_registered_node",
    "pytree",
    "storage_key",
]


def dynamo_settings(**wanted: Any) -> Any:
    """Return a context in which dynamo's settings have these values; those that this torch lacks are left out."""
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    return torch._dynamo.config.patch(known)


def is_registered_node(kind: type) -> bool:
    """Return whether pytree opens values of exactly this type."""
    return kind in pytree.SUPPORTED_NODES


def storage_key(value: torch.Tensor) -> int:
    """Return a number that tensors share while they live if, and only if, they share memory; fake tensors have one."""
    return int(value.untyped_storage()._cdata)
