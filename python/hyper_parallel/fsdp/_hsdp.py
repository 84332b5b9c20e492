"""HyperParallel's module class."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ._module import FSDPModule, _states, check_bool, number


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that the engine holds on this rank, by purpose.

    Args:
        shards, gradients: flat shards, and their gradients.
        pool: gathered parameters, buffers to reduce and to receive: everything taken from the pool so far.
        copies: what mapping shards of a host's ranks needs.
        mapped: shards of other ranks of the host that are seen in place; no memory of this rank.
    """

    shards: int
    gradients: int
    pool: int
    copies: int
    mapped: int

    @property
    def total(self) -> int:
        """Memory of this rank."""
        return self.shards + self.gradients + self.pool + self.copies


class HSDPModule(FSDPModule):
    """HyperParallel's methods, and those of the engine that FSDP2 has no names for."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients are reduced over the shard group only, and kept, until a backward runs with True.

        Holds without replicas, too. Raises ValueError: no bool.
        """
        check_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        self._set("set_requires_all_reduce", requires_all_reduce, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """See FSDPModule. Raises ValueError: no bool."""
        super().set_reshard_after_backward(reshard_after_backward, recurse=recurse)

    def set_reduce_op_type(self, op: str, recurse: bool = True) -> None:
        """"avg" or "sum": how gradients of different ranks are combined. Raises ValueError otherwise."""
        if not isinstance(op, str):
            raise ValueError(f"[set_reduce_op_type] op is {op!r}, want \"avg\" or \"sum\"")
        self._set("set_reduce_op_type", op, recurse)

    def set_gradient_scaling_factor(self, factor: float | torch.Tensor | None = None) -> None:
        """Every reduction of this unit is multiplied by it; None: not any more. Raises ValueError: bool, not one element, not finite."""
        value = None if factor is None else number("set_gradient_scaling_factor", "factor", factor)
        self._set_own("set_gradient_scaling_factor", value)

    def set_gradient_divide_factor(self, factor: float | None, recurse: bool = False) -> None:
        """Gradients are divided by it instead of by the number of ranks; None: not any more.

        Raises ValueError: no number, zero, not finite.
        """
        value = None if factor is None else number("set_gradient_divide_factor", "factor", factor)
        self._set("set_gradient_divide_factor", value, recurse)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None, recurse: bool = False) -> None:
        """See FSDPModule; None takes the hook away. Raises ValueError: a stream, no function."""
        super().set_all_reduce_hook(hook, stream=stream)  # type: ignore[arg-type]
        self._set("set_all_reduce_hook", hook, recurse)

    def set_custom_all_gather(self, comm: Callable[..., Any] | None) -> None:
        """See FSDPModule; None restores the engine's. Raises ValueError: nothing that can be called, gradients are in flight."""
        if comm is not None:
            return super().set_custom_all_gather(comm)
        self._restore("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Callable[..., Any] | None) -> None:
        """See FSDPModule; None restores the engine's. Raises ValueError: nothing that can be called, gradients are in flight."""
        if comm is not None:
            return super().set_custom_reduce_scatter(comm)
        self._restore("set_custom_reduce_scatter")

    def _restore(self, name: str) -> None:
        getattr(self._unit, name)(None)
        self._hyper_parallel_state.switches.pop(name, None)

    def reset_iter_state(self, recursive: bool = True) -> None:
        """See FSDPModule; with ``recursive=False`` this unit only. Raises ValueError: no bool; CommError."""
        check_bool("reset_iter_state", "recursive", recursive)
        self._unit.reset_iter_state(recursive)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and main gradients as well. Local. Raises ValueError: no bool."""
        check_bool("zero_grad", "set_to_none", set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._unit.zero_grad(set_to_none)

    def main_grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The fp32 gradient of a parameter of this module, with ``apply_grad_on_fp32_main_grad``; None while it has none.

        A DTensor like the parameter, ``parameter.main_grad``, or this rank's part where the parameter is a plain tensor.
        Raises ValueError: no parameter of a unit below.
        """
        for state in _states(cast(nn.Module, self), True):
            for i, slot in enumerate(state.slots):
                if state.unit.parameter(i) is parameter:
                    return state.unit.main_grad(i) if slot.ragged else getattr(parameter, "main_grad", None)
        raise ValueError(f"[main_grad] a tensor of shape {tuple(parameter.shape)} is no parameter of a unit in {type(self).__name__}")

    def wait_for_gradients(self) -> None:
        """Waits for reductions that backwards with ``set_is_last_backward(False)`` left in flight, of the whole tree.

        Collective if there are any. Raises CommError.
        """
        self._unit.wait_for_gradients()

    def memory_use(self) -> MemoryUse:
        """What the engine holds for this unit and all below, now. Local."""
        return MemoryUse(**self._unit.memory())

    def plan_memory(self, *, local_accumulation: bool = False, partial_accumulation: bool = False) -> MemoryUse:
        """What ``memory_use`` will be from the third step on, if every forward runs each unit once. Local, before the first step.

        Args:
            local_accumulation: some backwards run with ``set_requires_gradient_sync(False)``.
            partial_accumulation: some backwards run with ``set_requires_all_reduce(False)``.
        Raises ValueError: no bool.
        """
        check_bool("plan_memory", "local_accumulation", local_accumulation)
        check_bool("plan_memory", "partial_accumulation", partial_accumulation)
        return MemoryUse(**self._unit.plan_memory(local_accumulation, partial_accumulation))

    def transport(self) -> str:
        """How the data-parallel ranks of this unit talk: "samehost" (memory that they share), "gloo", or what a world of one says."""
        return self._unit.transport()
