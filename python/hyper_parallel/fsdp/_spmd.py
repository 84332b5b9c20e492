"""One mesh for data parallelism and everything else: parameters are DTensors on all of it."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ._collect import OP, Slot


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh are data parallelism's.

    Args:
        shard: name or names of the axes that parameters are sharded over; several are joined to one.
        replicate: name or names of the axes that hold replicas; several are joined to one.
    Raises ValueError: neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("[DataParallelMeshDims] shard and replicate are None, want at least one of them")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """``shard`` as a tuple, empty for None."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """``replicate`` as a tuple, empty for None."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


class SpmdMesh:
    """The argument dp_mesh_dims with the mesh that it is about."""

    def __init__(self, mesh: Any, dims: Any) -> None:
        if not any(cls.__name__ == "DataParallelMeshDims" for cls in type(dims).__mro__):
            raise ValueError(f"[{OP}] dp_mesh_dims is {type(dims).__name__}, want DataParallelMeshDims")
        if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
            raise ValueError(f"[{OP}] mesh is {mesh}, want one with mesh_dim_names for dp_mesh_dims")
        self.mesh = mesh
        self._names = mesh.mesh_dim_names
        self._shard, self._replicate = _names(dims.shard), _names(dims.replicate)
        given = self._replicate + self._shard
        for name in given:
            if name not in self._names:
                raise ValueError(f"[{OP}] dp_mesh_dims names {name!r}, want axes of the mesh {self._names}")
        if not given or len(set(given)) < len(given):
            raise ValueError(f"[{OP}] dp_mesh_dims names {given}, want each axis once, and at least one")
        self.shard_axes = [self._names.index(name) for name in self._shard]
        self.data_axes = sorted([self._names.index(name) for name in self._replicate] + self.shard_axes)
        for names in (self._shard, self._replicate):
            axes = [self._names.index(name) for name in names]
            if axes != list(range(axes[0], axes[0] + len(axes)) if axes else []):
                raise ValueError(f"[{OP}] dp_mesh_dims joins {names}, want axes that follow each other in {self._names}")

    @functools.cached_property
    def data(self) -> DeviceMesh:
        """[replicate, shard], or the one of them that there is. Collective where axes are joined for the first time."""
        parts = [_flat(self.mesh, names) for names in (self._replicate, self._shard) if names]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def check(self, slot: Slot) -> None:
        parameter = slot.parameter
        if not isinstance(parameter, DTensor):
            raise ValueError(f"[{OP}] parameter {slot.name} is a plain tensor, want a DTensor on {self.mesh} for dp_mesh_dims")
        where = f"(parameter {slot.name}, a DTensor on {parameter.device_mesh} with {parameter.placements})"
        if parameter.device_mesh != self.mesh:
            raise ValueError(f"[{OP}] the parameter lies on another mesh, want {self.mesh} {where}")
        for axis, placement in enumerate(parameter.placements):
            if axis in self.data_axes and not isinstance(placement, Replicate):
                raise ValueError(f"[{OP}] placement on axis {self._names[axis]!r} is {placement}, want Replicate() {where}")
            if placement.is_partial() or not (placement.is_shard() or placement.is_replicate()):
                raise ValueError(f"[{OP}] placement {placement} cannot be cut further, want Shard or Replicate {where}")

    def place(self, slot: Slot, own: Placement) -> None:
        parameter: Any = slot.parameter
        if isinstance(own, Shard):
            own = self._own(slot, parameter, own)
        slot.cut = parameter._spec
        slot.data_axes = tuple(self.data_axes)
        placements = [own if axis in self.shard_axes else placement for axis, placement in enumerate(parameter.placements)]
        if len(self.shard_axes) < 2:
            slot.mesh, slot.placements = self.mesh, tuple(placements)
            return
        # The joined axis, after the one of replicas, stands where the first of its parts does.
        meshes, joined = [], []
        for axis, name in enumerate(self._names):
            if axis == self.shard_axes[0]:
                meshes.append(self.data)
                joined += [Replicate()] * (self.data.ndim - 1) + [own]
            elif axis not in self.data_axes:
                meshes.append(self.mesh[name])
                joined.append(placements[axis])
        slot.mesh, slot.placements = DeviceMesh._concatenate(meshes), tuple(joined)

    def _own(self, slot: Slot, parameter: DTensor, own: Shard) -> Placement:
        """The shard axis cuts what the others leave; axes to its right have to be told."""
        right = parts = 1
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard(own.dim):
                parts *= self.mesh.size(axis)
                right *= self.mesh.size(axis) if axis > self.shard_axes[0] else 1
        shards = parts * self.data.size(self.data.ndim - 1)
        if right > 1 and slot.shape[own.dim] % shards != 0:
            raise ValueError(f"[{OP}] dim {own.dim} of size {slot.shape[own.dim]} is cut by axes to the right of the shard axis too, "
                             f"want a multiple of {shards} (parameter {slot.name}, a DTensor with {parameter.placements})")
        return _StridedShard(own.dim, split_factor=right) if right > 1 else own
