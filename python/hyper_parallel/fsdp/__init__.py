"""The names of torch.distributed.fsdp 2.13 (fully_shard, "FSDP2"): ``from hyper_parallel.fsdp import fully_shard`` is the one change."""
from ._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from ._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._spmd import DataParallelMeshDims
from ._wrap import ReplicateModule, fully_shard, replicate

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
