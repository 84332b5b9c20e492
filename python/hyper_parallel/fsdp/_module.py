"""The class that sharded modules get, and what goes with it."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .. import _C

Flag = bool


def _check_bool(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"[{op}] {name} is {value!r}, want True or False")


def _units(op: str, modules: Any) -> list[Any]:
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"[{op}] modules is {type(modules).__name__}, want a list of sharded modules")
    for i, module in enumerate(modules):
        if not isinstance(module, FSDPModule):
            raise ValueError(f"[{op}] element {i} is {type(module).__name__}, want a module that fully_shard was called on")
    return [module._hyper_parallel_state.unit for module in modules]


class UnshardHandle:
    """Waits for ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, handle: Any = None) -> None:
        self._handle = handle

    def wait(self) -> None:
        """The gathered parameters are registered with the module afterwards. Waiting twice is harmless. Raises CommError."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None


class FSDPModule:
    """Methods of a module that fully_shard was called on. Its class is a subclass of this one and of the module's own class.

    Switches with ``recurse`` reach all units below. They are local, and must be set alike on all ranks.
    """

    _hyper_parallel_state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers make new ones of their own class, as when a ModuleList is sliced: those are no units.
        mro = cls.__mro__
        plain: Any = mro[mro.index(FSDPModule) + 1]
        self = plain.__new__(plain)
        self.__init__(*args, **kwargs)
        return self

    @property
    def _unit(self) -> Any:
        return self._hyper_parallel_state.unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this unit and registers them in place of the shards, until ``reshard`` or the end of a backward.

        Collective over the shard group. Returns a handle to wait on with ``async_op``, else None. Raises CommError.
        """
        _check_bool("unshard", "async_op", async_op)
        handle = self._unit.unshard(async_op)
        return UnshardHandle(handle) if async_op else None

    def reshard(self) -> None:
        """Frees the gathered parameters of this unit and registers the shards. Local; nothing happens if there are none."""
        self._unit.reshard()

    def reset_iter_state(self) -> None:
        """Drops what an aborted iteration left behind in the whole tree: gathers and reductions in flight, unreduced gradients.

        ``.grad`` stays. Collective if communication was in flight. After an exception in a backward the next forward does it by
        itself; nothing is left after one in a forward.
        """
        self._unit.reset_iter_state(True)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of backward does not wait for reductions; the next backward with True does. For the whole tree."""
        _check_bool("set_is_last_backward", "is_last_backward", is_last_backward)
        self._unit.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps full local gradients, without communication, until a backward runs with True."""
        _check_bool("set_requires_gradient_sync", "requires_gradient_sync", requires_gradient_sync)
        self._unit.set_requires_gradient_sync(requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients are reduced over the shard group only, and kept, until a backward runs with True. Without replicas nothing
        changes."""
        _check_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        for state in _states(cast(nn.Module, self), recurse):
            if state.replicates:
                state.unit.set_requires_all_reduce(requires_all_reduce, False)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after forward. Raises ValueError: no bool."""
        _check_bool("set_reshard_after_forward", "reshard_after_forward", reshard_after_forward)
        self._unit.set_reshard_after_forward(reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay gathered after a backward that completes no gradients, for the next forward."""
        _check_bool("set_reshard_after_backward", "reshard_after_backward", reshard_after_backward)
        self._unit.set_reshard_after_backward(reshard_after_backward, recurse)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """These units are gathered right after this one in forward, in this order, in place of the one that came next last time.

        An empty list restores that. Raises ValueError: no list of sharded modules.
        """
        units = _units("set_modules_to_forward_prefetch", modules)
        self._unit.set_modules_to_forward_prefetch(units or None)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Likewise in backward."""
        units = _units("set_modules_to_backward_prefetch", modules)
        self._unit.set_modules_to_backward_prefetch(units or None)

    def set_custom_all_gather(self, comm: Callable[..., Any]) -> None:
        """``comm(output_tensor, input_tensor, group, async_op=True)`` gathers this unit; returns a Work, or None when it is done.

        ``output_tensor`` [W * n] and ``input_tensor`` [n], a part of it, have the compute dtype; they are ours, so that
        ``comm.allocate`` is not called. Raises ValueError: gradients are in flight.
        """
        self._unit.set_custom_all_gather(_starter(self._hyper_parallel_state, comm))

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """``comm(output_tensor, input_tensor, group, op, async_op=True)`` sums the gradients of this unit. ``op`` is always SUM;
        averages are taken afterwards. ``input_tensor`` [W * n] has one row for each rank, ``output_tensor`` is [n]."""
        self._unit.set_custom_reduce_scatter(_starter(self._hyper_parallel_state, comm, dist.ReduceOp.SUM))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """``hook(reduced)`` is given this unit's reduced gradient, flat, in the reduce dtype, before it becomes ``.grad``, and may
        change it in place. Raises ValueError: a stream."""
        if stream is not None:
            raise ValueError("[set_all_reduce_hook] stream is given, want None: there are none on a CPU mesh")
        self._unit.set_all_reduce_hook(hook, False)

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward waits for ``event`` (``synchronize()``, or a function that is called) before it reads the shards."""
        wait = getattr(event, "synchronize", event)
        if not callable(wait):
            raise ValueError(f"[set_post_optim_event] event is {type(event).__name__}, want one with synchronize(), or a function")
        self._unit.set_post_optim_event(wait)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """This unit's gradients are divided by it instead of by the number of ranks. Raises ValueError: zero or not finite."""
        self._unit.set_gradient_divide_factor(float(factor), False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Changes nothing: gradients always travel to be summed, and factors are applied to the sum."""
        _check_bool("set_force_sum_reduction_for_comms", "enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """False: a unit that ran forward and got no gradient is left out of the reduction instead of taking part with zeros.

        Only right when it gets none on every rank. The default here is True.
        """
        _check_bool("set_reduce_scatter_unused_params", "reduce_scatter_unused_params", reduce_scatter_unused_params)
        self._unit.set_reduce_scatter_unused_params(reduce_scatter_unused_params, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Changes nothing: a unit's buffer is free again when the next unit needs one. Raises TypeError, ValueError as torch."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"[set_reduce_scatter_max_input_buffers] max_input_buffers is {max_input_buffers!r}, want an int")
        if max_input_buffers < 1:
            raise ValueError(f"[set_reduce_scatter_max_input_buffers] max_input_buffers is {max_input_buffers}, want 1 or more")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Changes nothing: gathers and reductions of a group do not wait for each other."""
        _check_bool("set_separate_reduce_scatter_group", "enable", enable)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: the backward of this unit does not read its parameters (an embedding), so they are not gathered for it."""
        _check_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        self._unit.set_unshard_in_backward(unshard_in_backward)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Changes nothing: buffers always come from the group's own memory."""
        _check_bool("set_allocate_memory_from_process_group_for_comm", "enable", enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises ValueError: symmetric memory is NCCL's."""
        raise ValueError(f"[set_symm_mem_for_comm] backend is {backend!r}, which this build has none of: its groups are CPU groups")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self._hyper_parallel_state.after_conversion()
        return result


def _states(module: nn.Module, recurse: bool) -> Iterable[Any]:
    """Of the units in a module, each once."""
    seen: set[int] = set()
    for each in module.modules() if recurse else [module]:
        if isinstance(each, FSDPModule) and id(each._hyper_parallel_state) not in seen:
            seen.add(id(each._hyper_parallel_state))
            yield each._hyper_parallel_state


def _starter(state: Any, comm: Callable[..., Any], *op: Any) -> Callable[..., Any]:
    if not callable(comm):
        raise ValueError(f"[set_custom_communication] comm is {type(comm).__name__}, want something that can be called")
    group = state.mesh.get_group(state.mesh.ndim - 1)

    def start(output: torch.Tensor, input: torch.Tensor) -> Any:
        work = comm(output, input, group, *op, async_op=True)
        return None if work is None else work.wait

    return start


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Calls of ``module.method_name`` gather and free the unit as calls of the module do. Nothing happens for a module that is no unit.

    Raises ValueError: no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"[register_fsdp_forward_method] {type(module).__name__} has no method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit, member = self._hyper_parallel_state.unit, self._hyper_parallel_member
        args, kwargs = unit.enter(member, args, kwargs) or (args, kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException:
            unit.abandon(member, False)
            raise
        return unit.leave(member, result)

    setattr(module, method_name, call.__get__(module, type(module)))  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Changes nothing but checks its argument: there are no streams to share on a CPU mesh. Raises ValueError: no sharded module."""
    _units("share_comm_ctx", list(modules))
