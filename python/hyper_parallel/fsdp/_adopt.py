"""What is registered around the engine's shards, and what programs may register in its place."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from ._collect import OP, Slot


class State:
    """What a sharded module knows of its unit. Shared by the modules of a list."""

    def __init__(self, unit: Any, mesh: DeviceMesh, slots: list[Description], replicates: bool) -> None:
        self.unit = unit
        self.mesh = mesh
        self.slots = slots
        self.replicates = replicates

    def after_conversion(self) -> None:
        """Module._apply has converted, or replaced, the shards that are registered."""
        began_on_meta = any(self.unit.sharded(i).is_meta for i in range(len(self.slots)))
        entries = [places[0][0][places[0][1]] for places in (slot.places for slot in self.slots)]
        if began_on_meta and not any(entry.is_meta for entry in entries):
            # to_empty: there are no values to take over.
            self.unit.to_empty()
            for i, entry in enumerate(entries):
                _register(self.unit, i, self.slots[i], entry)
        self.unit.follow()

    def before_state_dict(self, *_: Any) -> None:
        if self.unit.shows_gathered():
            self.unit.reshard()


@dataclass
class Description:
    """Of one slot, without the whole parameter. ragged: the program sees the shard itself, a plain tensor; cut: an axis that the
    engine does not know has cut the parameter."""

    name: str
    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    places: list[tuple[dict[str, Any], str]]
    ragged: bool
    cut: bool = False


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _dtensor_over(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> Any:
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, _contiguous_stride(shape), local.dtype))
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[attr-defined]


def local_of(parameter: Any) -> torch.Tensor:
    return parameter._local_tensor.detach()


def block_wrapper(cut: DTensorSpec) -> Callable[[torch.Tensor], Any]:
    """What a module computes with: a parameter that is a DTensor as it was before."""

    def wrap(local: torch.Tensor) -> Any:
        whole = _dtensor_over(local, cut.mesh, cut.placements, cut.shape)
        whole._is_param = True
        return whole

    return wrap


def make_parameter(slot: Slot, local: torch.Tensor) -> nn.Parameter:
    assert slot.mesh is not None
    whole = _dtensor_over(local, slot.mesh, slot.placements, slot.shape)
    parameter: Any = nn.Parameter(whole, requires_grad=slot.requires_grad)
    parameter._local_tensor = local  # the Parameter made an alias of it
    parameter.__dict__.update({name: value for name, value in slot.parameter.__dict__.items() if name != "_is_param"})
    return parameter


def _register(unit: Any, i: int, slot: Description, entry: Any) -> None:
    """Makes `entry`, a DTensor, the parameter around the engine's shard."""
    if not slot.ragged:
        entry._local_tensor = unit.sharded(i)
    unit.replace(i, entry)


def adopt(slots: list[Description], unit: Any, i: int, entry: Any) -> None:
    """Somebody has registered another tensor in place of a shard: a state dictionary with assign=True, a conversion."""
    slot = slots[i]
    where = f"(parameter {slot.name} of unit {unit.name()})"
    if not isinstance(entry, torch.Tensor):
        raise ValueError(f"[{OP}] a parameter was replaced by {type(entry).__name__}, want a tensor {where}")
    sharded, old = unit.sharded(i), unit.parameter(i)
    with torch.no_grad():
        if isinstance(entry, DTensor):
            if entry.shape != slot.shape:
                raise ValueError(f"[{OP}] a parameter was replaced by one of shape {tuple(entry.shape)}, want {tuple(slot.shape)} {where}")
            same = entry.device_mesh == slot.mesh and tuple(entry.placements) == slot.placements
            values = entry._local_tensor if same else entry.redistribute(slot.mesh, slot.placements)._local_tensor
        else:
            same, values = False, entry.detach()
        if values.is_meta:
            raise ValueError(f"[{OP}] a parameter was moved to the meta device, want one with values {where}")
        if sharded.is_meta:
            unit.to_empty()
            sharded.copy_(values if values.shape == sharded.shape else _own_part(slot, values))
        else:
            sharded.data = values.detach()  # the engine takes the values over, cuts whole ones, and follows another dtype
    if slot.ragged:
        unit.replace(i, old)
        return
    if same and isinstance(entry, nn.Parameter):
        _register(unit, i, slot, entry)
    else:
        old.requires_grad_(entry.requires_grad)
        unit.replace(i, old)


def _own_part(slot: Description, whole: torch.Tensor) -> torch.Tensor:
    if whole.shape != slot.shape:
        raise ValueError(f"[{OP}] parameter {slot.name} was replaced by a tensor of shape {tuple(whole.shape)}, want {tuple(slot.shape)}")
    mesh = slot.mesh
    coordinate: Any = mesh.get_coordinate()
    if mesh.ndim > 2:
        raise ValueError(f"[{OP}] parameter {slot.name} was replaced by a plain tensor, want a DTensor: two meshes cut it")
    part = whole
    for axis, placement in enumerate(slot.placements):
        if isinstance(placement, Shard):
            chunks = torch.chunk(part, mesh.size(axis), placement.dim)
            mine = coordinate[axis]
            part = chunks[mine] if mine < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part
