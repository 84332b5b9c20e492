"""Hybrid-sharded data parallelism for torch.nn modules.

``hyper_parallel.fsdp`` has the names of ``torch.distributed.fsdp`` (2.13); this module has HyperParallel's. Both run on one engine.
"""
import torch as _torch  # noqa: F401  its libraries come first: ours link them

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from . import _C, fsdp, optim, trace
from ._source import (
    ModuleShardingSpec,
    ShardingPlan,
    build_source_shard_info,
    build_source_shard_info_by_param,
    default_source_shard_info,
    managed_parameters,
    managed_source_shard_infos,
    set_source_gradient_factor,
)
from ._state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from ._tools import UnshardScope, ZeroLevel, load_from_rank0, load_full, reset_parameters, set_zero_level
from .fsdp._comm import init_process_group
from .fsdp._hsdp import HSDPModule, MemoryUse
from .fsdp._module import UnshardHandle, register_fsdp_forward_method
from .fsdp._policy import CPUOffloadPolicy, MemoryBudget, OffloadPolicy
from .fsdp._policy import HyperMixedPrecisionPolicy as MixedPrecisionPolicy
from .fsdp._source import CopyGradient, SourceShardMetaInfo
from .fsdp._wrap import hyper_fully_shard as fully_shard
from .optim import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

CommError = _C.CommError
CommError.__doc__ = "Communication failed: a rank has gone, or a connection broke. A RuntimeError."
TimeoutError = _C.TimeoutError
TimeoutError.__doc__ = "A rank did not take part in time; the limit is that of the default process group. A CommError."


def hsdp_sync_stream() -> None:
    """Waits for the gradients that backwards with ``set_is_last_backward(False)`` left in flight and gives them to the parameters.

    Collective if there are any. Raises CommError, TimeoutError.
    """
    _C.hsdp_sync_stream()


__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "CopyGradient",
    "DTensor",
    "DeviceMesh",
    "HSDPModule",
    "MemoryBudget",
    "MemoryUse",
    "MixedPrecisionPolicy",
    "ModuleShardingSpec",
    "OffloadPolicy",
    "ShardingPlan",
    "SourceShardMetaInfo",
    "StateDictOptions",
    "TimeoutError",
    "UnshardHandle",
    "UnshardScope",
    "ZeroLevel",
    "build_source_shard_info",
    "build_source_shard_info_by_param",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "default_source_shard_info",
    "distribute_tensor",
    "fsdp",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "get_total_norm",
    "hsdp_sync_stream",
    "init_device_mesh",
    "init_process_group",
    "load_from_rank0",
    "load_full",
    "managed_parameters",
    "managed_source_shard_infos",
    "optim",
    "register_fsdp_forward_method",
    "reset_parameters",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_source_gradient_factor",
    "set_state_dict",
    "set_zero_level",
    "trace",
]
