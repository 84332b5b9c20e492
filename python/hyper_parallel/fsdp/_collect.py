"""Which parameters a unit manages, and where modules register them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

OP = "fully_shard"


@dataclass
class Slot:
    """A parameter on its way into a unit, and what describes its shard. One that is a DTensor is cut further; the engine gets its block.

    plain: no DTensor describes the shard, so that it is a plain tensor. data_axes: those of a DTensor's mesh that are data
    parallelism's.
    """

    name: str
    parameter: nn.Parameter
    member: int
    shape: torch.Size
    requires_grad: bool
    mesh: DeviceMesh | None = None
    cut: DTensorSpec | None = None
    replicated: bool = False
    dim: int = 0
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    placements: tuple[Placement, ...] = ()
    plain: bool = False
    data_axes: tuple[int, ...] = ()


class Collector:
    """Walks modules, leaves out what is ignored or below an inner unit, and finds every place where a parameter is registered."""

    def __init__(self, ignored: set[int]) -> None:
        self.slots: list[Slot] = []
        self.children: dict[int, tuple[Any, list[str]]] = {}
        self.modules: list[nn.Module] = []  # that register managed parameters
        self._ignored = ignored
        self._by_id: dict[int, Slot] = {}
        self._visited: set[int] = set()

    def collect(self, module: nn.Module, member: int, prefix: str = "", top: bool = True, inside: bool = False) -> None:
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        state = None if top else module.__dict__.get("_hyper_parallel_state")
        if state is not None:
            _, paths = self.children.setdefault(id(state), (state.unit, []))
            position: int = module.__dict__["_hyper_parallel_member"]
            paths.extend([""] * (position + 1 - len(paths)))
            paths[position] = prefix[:-1]
            inside = True
        if not inside:
            self._take(module, member, prefix)
        for name, child in module._modules.items():
            if child is not None:
                self.collect(child, member, f"{prefix}{name}.", False, inside)

    def _take(self, module: nn.Module, member: int, prefix: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            which = f"module {prefix[:-1]}" if prefix else "the module"
            raise ValueError(f"[{OP}] {which} is a {type(module).__name__}, whose parameters belong to TorchScript, want the nn.Module "
                             "that it was made from")
        managed = False
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._ignored:
                continue
            managed = True
            slot = self._by_id.get(id(parameter))
            if slot is None:
                _refuse_subclasses(parameter, prefix + name)
                slot = Slot(prefix + name, parameter, member, parameter.shape, parameter.requires_grad)
                self._by_id[id(parameter)] = slot
                self.slots.append(slot)
            slot.places.append((module._parameters, name))
        if managed:
            self.modules.append(module)


def _refuse_subclasses(parameter: nn.Parameter, name: str) -> None:
    """Those whose values are not in the tensor's own memory, or that FSDP2 would ask what to gather and what to make of it."""
    inner: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    cls = type(inner)
    what = [hook for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if hasattr(inner, hook)]
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what.append("__torch_dispatch__")
    if what:
        raise ValueError(f"[{OP}] the parameter is a {cls.__name__}, whose {what[0]} is not called here, want a plain tensor, a DTensor "
                         f"over one, or the parameter among ignored_params (parameter {name})")


def outermost(module: Any) -> tuple[list[nn.Module], bool]:
    """The modules that form the unit, without those below another one."""
    if isinstance(module, list):
        if not module:
            raise ValueError(f"[{OP}] list of modules is empty, want at least one")
        for i, each in enumerate(module):
            if not isinstance(each, nn.Module):
                raise ValueError(f"[{OP}] element {i} is {type(each).__name__}, want a torch.nn.Module")
    elif not isinstance(module, nn.Module):
        raise ValueError(f"[{OP}] module is {type(module).__name__}, want a torch.nn.Module or a list of them")
    given = module if isinstance(module, list) else [module]
    for each in given:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"[{OP}] module is a {type(each).__name__}, which has no forward: shard its elements")
        if "_hyper_parallel_state" in each.__dict__:
            raise ValueError(f"[{OP}] module {type(each).__name__} is already a unit, want fully_shard once per module")
    below = {id(child) for each in given for child in each.modules() if child is not each}
    roots: list[nn.Module] = []
    for each in given:
        if id(each) not in below and not any(each is root for root in roots):
            roots.append(each)
    return roots, isinstance(module, list)
