"""The class that sharded modules get, and what goes with it."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .. import _C

def check_bool(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"[{op}] {name} is {value!r}, want True or False")


def number(op: str, name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"[{op}] {name} is {value!r}, want a number or a tensor of one element")
    return float(value)


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

    def _set(self, name: str, value: Any, recurse: Any) -> None:
        """Calls a setter of the engine that takes ``recurse``, and remembers it for copies."""
        check_bool(name, "recurse", recurse)
        getattr(self._unit, name)(value, recurse)
        for state in _states(cast(nn.Module, self), recurse):
            state.switches[name] = (value, False)

    def _set_own(self, name: str, *arguments: Any) -> None:
        """Likewise one for this unit."""
        getattr(self._unit, name)(*arguments)
        self._hyper_parallel_state.switches[name] = arguments

    def _prefetch(self, name: str, modules: Any) -> None:
        units = _units(name, modules)
        getattr(self._unit, name)(units or None)
        self._hyper_parallel_state.prefetch[name] = units

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this unit and registers them in place of the shards, until ``reshard`` or the end of a backward.

        Collective over the shard group. Returns a handle to wait on with ``async_op``, else None.
        Raises ValueError: no bool; CommError.
        """
        check_bool("unshard", "async_op", async_op)
        handle = self._unit.unshard(async_op)
        return UnshardHandle(handle) if async_op else None

    def reshard(self) -> None:
        """Frees the gathered parameters of this unit and registers the shards. Local; nothing happens if there are none."""
        self._unit.reshard()

    def reset_iter_state(self) -> None:
        """Drops what an aborted iteration left behind in the whole tree: gathers and reductions in flight, unreduced gradients.

        ``.grad`` stays. Collective if communication was in flight. After an exception in a backward the next forward does it by
        itself; nothing is left after one in a forward. Raises CommError.
        """
        self._unit.reset_iter_state(True)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of backward does not wait for reductions; the next backward with True does. For the whole tree.

        Raises ValueError: no bool.
        """
        check_bool("set_is_last_backward", "is_last_backward", is_last_backward)
        self._set_own("set_is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps full local gradients, without communication, until a backward runs with True.

        Raises ValueError: no bool.
        """
        check_bool("set_requires_gradient_sync", "requires_gradient_sync", requires_gradient_sync)
        self._set("set_requires_gradient_sync", requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients are reduced over the shard group only, and kept, until a backward runs with True. Without replicas nothing
        changes. Raises ValueError: no bool."""
        check_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        check_bool("set_requires_all_reduce", "recurse", recurse)
        for state in _states(cast(nn.Module, self), recurse):
            if state.replicates:
                state.unit.set_requires_all_reduce(requires_all_reduce, False)
                state.switches["set_requires_all_reduce"] = (requires_all_reduce, False)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after forward. Raises ValueError: no bool."""
        check_bool("set_reshard_after_forward", "reshard_after_forward", reshard_after_forward)
        self._set("set_reshard_after_forward", reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay gathered after a backward that completes no gradients, for the next forward.

        Raises ValueError: no bool.
        """
        check_bool("set_reshard_after_backward", "reshard_after_backward", reshard_after_backward)
        self._set("set_reshard_after_backward", reshard_after_backward, recurse)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """These units are gathered right after this one in forward, in this order, in place of the one that came next last time.

        An empty list restores that. Raises ValueError: no list of sharded modules.
        """
        self._prefetch("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Likewise in backward. Raises ValueError: no list of sharded modules."""
        self._prefetch("set_modules_to_backward_prefetch", modules)

    def set_custom_all_gather(self, comm: Callable[..., Any]) -> None:
        """``comm(output_tensor, input_tensor, group, async_op=True)`` gathers this unit; returns a Work, or None when it is done.

        ``output_tensor`` [W * n] and ``input_tensor`` [n], a part of it, have the compute dtype; they are ours, so that
        ``comm.allocate`` is not called. Raises ValueError: nothing that can be called, gradients are in flight.
        """
        self._set_own("set_custom_all_gather", _starter("set_custom_all_gather", self._hyper_parallel_state, comm))

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """``comm(output_tensor, input_tensor, group, op, async_op=True)`` sums the gradients of this unit. ``op`` is always SUM;
        averages are taken afterwards. ``input_tensor`` [W * n] has one row for each rank, ``output_tensor`` is [n]; both have the
        reduce dtype. Raises ValueError: nothing that can be called, gradients are in flight."""
        start = _starter("set_custom_reduce_scatter", self._hyper_parallel_state, comm, dist.ReduceOp.SUM)
        self._set_own("set_custom_reduce_scatter", start)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """``hook(reduced)`` is given this unit's reduced gradient, flat, in the reduce dtype, before it becomes ``.grad``, and may
        change it in place. None takes it away. Raises ValueError: a stream, no function."""
        if hook is not None and not callable(hook):
            raise ValueError(f"[set_all_reduce_hook] hook is {type(hook).__name__}, want a function")
        if stream is not None:
            raise ValueError("[set_all_reduce_hook] stream is given, want None: there are none on a CPU mesh")
        self._set_own("set_all_reduce_hook", hook, False)

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward waits for ``event`` (``synchronize()``, or a function that is called) before it reads the shards.

        Raises ValueError: neither.
        """
        wait = getattr(event, "synchronize", event)
        if not callable(wait):
            raise ValueError(f"[set_post_optim_event] event is {type(event).__name__}, want one with synchronize(), or a function")
        self._unit.set_post_optim_event(wait)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """This unit's gradients are divided by it instead of by the number of ranks.

        Raises ValueError: no number, zero, not finite.
        """
        self._set_own("set_gradient_divide_factor", number("set_gradient_divide_factor", "factor", factor), False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of set_gradient_divide_factor. Raises as that does."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True holds at all times: communication only ever adds, and factors are applied to sums by this rank. False allows other
        operations, and none is used. Raises ValueError: no bool."""
        check_bool("set_force_sum_reduction_for_comms", "enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """False: a unit that ran forward and got no gradient is left out of the reduction instead of taking part with zeros.

        Only right when it gets none on every rank. The default here is True. Raises ValueError: no bool.
        """
        check_bool("set_reduce_scatter_unused_params", "reduce_scatter_unused_params", reduce_scatter_unused_params)
        self._set("set_reduce_scatter_unused_params", reduce_scatter_unused_params, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Any bound holds at all times: one unit's reduction gives its buffer back before the next one takes its own. A higher bound
        brings no more overlap. Raises TypeError: no int; ValueError: less than 1."""
        op = "set_reduce_scatter_max_input_buffers"
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"[{op}] max_input_buffers is {max_input_buffers!r}, want an int")
        if max_input_buffers < 1:
            raise ValueError(f"[{op}] max_input_buffers is {max_input_buffers}, want 1 or more")
        check_bool(op, "recurse", recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True holds at all times: gathers and reductions are matched by tags of their own and do not queue behind each other. False
        allows them to share a queue, which they have not. Raises ValueError: no bool."""
        check_bool("set_separate_reduce_scatter_group", "enable", enable)
        check_bool("set_separate_reduce_scatter_group", "recurse", recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: the backward of this unit does not read its parameters (an embedding), so they are not gathered for it.

        Set already for a unit that is one ``nn.Embedding``. Raises ValueError: no bool.
        """
        check_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        self._set_own("set_unshard_in_backward", unshard_in_backward)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """True holds at all times: staging buffers come from the allocator of the unit's group, whatever is set here; on a CPU mesh
        torch's groups have none either. Raises ValueError: no bool, True for a unit with communication of the user's own."""
        op = "set_allocate_memory_from_process_group_for_comm"
        check_bool(op, "enable", enable)
        custom = self._hyper_parallel_state.switches.keys() & {"set_custom_all_gather", "set_custom_reduce_scatter"}
        if enable and custom:
            raise ValueError(f"[{op}] enable is True after {min(custom)}, want one of the two (unit {self._unit.name()})")

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


def _starter(name: str, state: Any, comm: Callable[..., Any], *op: Any) -> Callable[..., Any]:
    if not callable(comm):
        raise ValueError(f"[{name}] comm is {type(comm).__name__}, want something that can be called")
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
    method = getattr(module, method_name, None) if isinstance(method_name, str) else None
    if not callable(method):
        raise ValueError(f"[register_fsdp_forward_method] {type(module).__name__} has no method {method_name}")
    # A copy of the module runs it on itself.
    bound = getattr(method, "__self__", None) is module
    function: Any = method.__func__ if bound else method

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit, member = self._hyper_parallel_state.unit, self._hyper_parallel_member
        args, kwargs = unit.enter(member, args, kwargs) or (args, kwargs)
        try:
            result = function(self, *args, **kwargs) if bound else function(*args, **kwargs)
        except BaseException:
            unit.abandon(member, False)
            raise
        return unit.leave(member, result)

    setattr(module, method_name, call.__get__(module, type(module)))  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Holds at all times: the streams that it would share are those of accelerators, and a CPU mesh has none; the memory of each tree
    is one pool. Raises ValueError: no list of sharded modules."""
    _units("share_comm_ctx", modules)
