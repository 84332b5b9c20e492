"""copy.deepcopy of sharded modules: the tree is copied with whole, empty parameters, sharded as before, and given the values."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ._adopt import State, dtensor_over

# In the memo of a deepcopy: pairs of states, of units that were copied.
_COPIED = "hyper_parallel units"
_OWN = ("_hyper_parallel_state", "_hyper_parallel_member")


def _empty(state: State, i: int) -> nn.Parameter:
    """What fully_shard is called on in the copy: a parameter of the whole shape that needs no memory."""
    slot, sharded, parameter = state.slots[i], state.unit.sharded(i), state.unit.parameter(i)
    cut = state.cuts[i]
    requires_grad, dtype = state.began[i]
    dtype = dtype if slot.ragged else sharded.dtype
    local = torch.empty((), dtype=dtype, device=sharded.device).expand(slot.shape if cut is None else state.unit.gathered(i).shape)
    whole = local if cut is None else dtensor_over(local, cut.mesh, cut.placements, slot.shape)
    empty = nn.Parameter(whole, requires_grad=requires_grad)
    if isinstance(parameter, DTensor):
        empty.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != "_is_param"})
    return empty


def _contents(root: nn.Module, memo: dict[Any, Any]) -> dict[str, Any]:
    """What `root` holds, copied, without what fully_shard has put there."""
    state = {name: value for name, value in root.__getstate__().items() if name not in _OWN}
    handles = root._hyper_parallel_state.hooks[root._hyper_parallel_member]  # type: ignore[union-attr, index]
    for name, value in state.items():
        if name.startswith("_forward_") and isinstance(value, dict):
            state[name] = type(value)((key, hook) for key, hook in value.items() if key not in handles)
    return copy.deepcopy(state, memo)


def _take_hooks(module: nn.Module, shell: Any) -> None:
    """Away with copies of hooks of the original's state."""
    for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(getattr(hook, "hook", hook), "__self__", None) is shell:
                del hooks[key]


def _replay(memo: dict[Any, Any]) -> None:
    """The switches of the originals. Lists of units name copies; what was not copied drops out."""
    copied = memo[_COPIED]
    units = {id(old.unit): new.unit for old, new in copied}
    for old, new in copied:
        new.switches = dict(old.switches)
        for name, arguments in old.switches.items():
            getattr(new.unit, name)(*arguments)
        new.prefetch = {}
        for name, listed in old.prefetch.items():
            found = [units[id(unit)] for unit in listed if id(unit) in units]
            if len(found) == len(listed):
                new.prefetch[name] = found
                getattr(new.unit, name)(found)


def deepcopy_unit(module: nn.Module, memo: dict[Any, Any], shard: Callable[..., Any], plain_class: Callable[[type], type]) -> nn.Module:
    """A sharded copy of a module and of all modules of its unit, with the same values, options and switches. Local.

    Gradients, accumulated ones too, are not copied, as torch does not for an nn.Parameter. Raises RuntimeError: the class has a
    ``__deepcopy__`` of its own, or another module of the unit is gone.
    """
    state: State = module._hyper_parallel_state  # type: ignore[assignment]
    roots = [reference() for reference in state.roots]
    for root in roots:
        if root is None:
            raise RuntimeError(f"[deepcopy] a module of the unit of {type(module).__name__} is gone, want all modules of its list")
        if hasattr(plain_class(type(root)), "__deepcopy__"):
            raise RuntimeError(f"[deepcopy] {type(root).__name__} has a __deepcopy__ of its own, want the copy made before fully_shard")
    state.before_state_dict()
    state.unit.follow()
    shell = object()
    memo[id(state)] = shell
    empties = [_empty(state, i) for i in range(len(state.slots))]
    for i, empty in enumerate(empties):
        # Parameters are known by either name: modules such as nn.LSTM keep the gathered ones.
        memo[id(state.unit.parameter(i))] = memo[id(state.unit.gathered(i))] = empty
    copies: list[Any] = []
    for root in roots:
        copies.append(object.__new__(plain_class(type(root))))
        memo[id(root)] = copies[-1]
    for root, made in zip(roots, copies):
        made.__setstate__(_contents(root, memo))  # type: ignore[arg-type]
    _shard_again(state, copies, empties, shell, shard, memo)
    for root, made in zip(roots, copies):
        made.__class__ = type(root)
    return memo[id(module)]


def _shard_again(state: State, copies: list[Any], empties: list[nn.Parameter], shell: Any, shard: Any, memo: dict[Any, Any]) -> None:
    number = {id(empty): i for i, empty in enumerate(empties)}
    places, ignored = {}, set()
    for each in {id(each): each for made in copies for each in made.modules()}.values():
        _take_hooks(each, shell)
        for name, parameter in each._parameters.items():
            if id(parameter) in number:
                places[id(each._parameters), name] = number[id(parameter)]
            elif parameter is not None:
                ignored.add(parameter)
    options = dict(state.options)
    options.update(
        module=copies if len(copies) > 1 else copies[0],
        mesh=state.mesh,
        shard_placement_fn=lambda parameter: Shard(state.dims[number[id(parameter)]]),
        ignored_params=ignored,
        replicate_params={empty for i, empty in enumerate(empties) if state.replicated[i]},
    )
    shard(**options)
    new: State = copies[0]._hyper_parallel_state
    with torch.no_grad():
        for j, slot in enumerate(new.slots):
            dictionary, name = slot.places[0]
            i = places[id(dictionary), name]
            values, sharded = state.unit.sharded(i), new.unit.sharded(j)
            if sharded.dtype != values.dtype:
                sharded.data = values.detach().clone()  # converted since; the engine follows, as then
            elif not sharded.is_meta:
                sharded.copy_(values)
            new.unit.parameter(j).requires_grad_(state.unit.parameter(i).requires_grad)
            memo[id(state.unit.parameter(i))] = new.unit.parameter(j)
    memo.setdefault(_COPIED, []).append((state, new))
    _replay(memo)
