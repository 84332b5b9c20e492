"""The names of torch.distributed.fsdp 2.13 (fully_shard, "FSDP2"): ``from hyper_parallel.fsdp import fully_shard`` is the one change."""
from ._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from ._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._wrap import fully_shard

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
