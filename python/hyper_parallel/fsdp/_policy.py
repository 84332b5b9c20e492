"""Policies of fully_shard. Those of torch.distributed.fsdp are taken as well."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of compute and of gradient reduction. The sharded parameters keep their own.

    Args:
        param_dtype: dtype of the gathered parameters, and so of compute. Default: the parameter's own.
        reduce_dtype: dtype in which gradients are reduced and accumulated. Default: that of the gradients. Sums run in fp32 or wider.
        output_dtype: floating outputs of the module's forward are cast to it.
        cast_forward_inputs: cast floating inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class HyperMixedPrecisionPolicy(MixedPrecisionPolicy):
    """HyperParallel's: hyper_parallel.MixedPrecisionPolicy.

    Args:
        apply_grad_on_fp32_main_grad: reduced gradients are fp32 tensors ``parameter.main_grad``, whatever the parameters' dtype, and
            ``.grad`` stays None. ``HSDPModule.zero_grad`` or ``parameter.main_grad = None`` clears them. ``hyper_parallel.optim``
            and ``clip_grad_norm_`` use them, torch's optimizers do not.
    """

    apply_grad_on_fp32_main_grad: bool = False


@dataclass(frozen=True)
class MemoryBudget:
    """For ``reshard_after_forward``: keep as many units gathered between forward and backward as fit, those first whose backward comes
    first. Decided when the first forward begins; with several budgets in a tree the smallest holds.

    Args:
        bytes: bounds what the engine holds on this rank for the whole tree, without optimizer state and activations.
    """

    bytes: int


@dataclass
class OffloadPolicy:
    """Shards, gradients and optimizer state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory. On a CPU mesh that is the case anyway.

    Args:
        pin_memory: page-locked memory, where the mesh's device is an accelerator.
    """

    pin_memory: bool = True
