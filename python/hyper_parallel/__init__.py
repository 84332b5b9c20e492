"""Hybrid-sharded data parallelism for torch.nn modules.

``hyper_parallel.fsdp`` has the names of ``torch.distributed.fsdp`` (2.13); this module has HyperParallel's. Both run on one engine.
"""
import torch as _torch  # noqa: F401  its libraries come first: ours link them

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from . import _C, fsdp, optim
from ._state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from .fsdp._module import HSDPModule, UnshardHandle
from .fsdp._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .fsdp._wrap import hyper_fully_shard as fully_shard
from .optim import clip_grad_norm_

CommError = _C.CommError
TimeoutError = _C.TimeoutError


def hsdp_sync_stream() -> None:
    """Waits for the gradients that backwards with ``set_is_last_backward(False)`` left in flight and gives them to the parameters.

    Collective if there are any. Raises CommError, TimeoutError.
    """
    _C.hsdp_sync_stream()


__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "DTensor",
    "DeviceMesh",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "TimeoutError",
    "UnshardHandle",
    "clip_grad_norm_",
    "distribute_tensor",
    "fsdp",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "hsdp_sync_stream",
    "init_device_mesh",
    "optim",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]
