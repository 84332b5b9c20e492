"""Parameters that hold this rank's block of a tensor that tensor or expert parallelism has cut."""
from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ._collect import OP, Slot
from ._comm import engine_mesh


class CopyGradient(enum.Enum):
    """What the gradients are that the ranks of a source axis compute for their copies of one parameter."""

    UNIT_OP = "unit_op"  # combined like those of data-parallel ranks: averaged with "avg", added with "sum"
    WHOLE = "whole"  # each rank has the whole gradient: averaged
    PARTIAL = "partial"  # each rank has a summand, e.g. of its part of a sequence: added


@dataclass(frozen=True)
class SourceShardMetaInfo:
    """How a parameter's tensor is this rank's block of a larger one.

    Args:
        mesh: the source axes, e.g. ``mesh["tp"]``, a part of the same mesh as the unit's. None: there are none.
        placements: one for each axis of ``mesh``: Shard where it cuts, Replicate where its ranks hold copies. A negative dim
            counts from the end.
        origin_is_dtensor: HyperParallel's mark of parameters that are DTensors. Must be False here: those need no description.
        shape: of the larger tensor. Without it all axes are taken to cut evenly: sizes multiply.
        copy_gradients: one for each axis, of which those count that hold copies. Empty: UNIT_OP for all.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    origin_is_dtensor: bool = False
    shape: tuple[int, ...] | None = None
    copy_gradients: tuple[CopyGradient, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        object.__setattr__(self, "shape", None if self.shape is None else tuple(self.shape))
        object.__setattr__(self, "copy_gradients", tuple(CopyGradient(kind) for kind in self.copy_gradients))


def as_tuple(placement: Any) -> tuple[Any, ...]:
    """A placement as _C takes it."""
    if isinstance(placement, _StridedShard):
        return ("strided_shard", placement.dim, placement.split_factor)
    if isinstance(placement, Shard):
        return ("shard", placement.dim)
    return ("replicate",) if isinstance(placement, Replicate) else ("partial",)


def from_tuple(fields: tuple[Any, ...]) -> Placement:
    if fields[0] == "strided_shard":
        return _StridedShard(fields[1], split_factor=fields[2])
    return Shard(fields[1]) if fields[0] == "shard" else Replicate()


def joined_mesh(mesh: DeviceMesh, other: DeviceMesh, where: str) -> DeviceMesh:
    """The axes of both, which must be parts of one mesh."""
    try:
        return DeviceMesh._concatenate([mesh, other])
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"[{OP}] mesh {mesh} does not go with that of the parameter, want two parts of one mesh: {error} "
                         f"{where}") from error


class Sources:
    """The argument source_shard_infos of one unit. The engine checks that it fits the parameters."""

    def __init__(self, infos: Any, slots: list[Slot], mesh: DeviceMesh) -> None:
        if not isinstance(infos, Mapping):
            raise ValueError(f"[{OP}] source_shard_infos is {type(infos).__name__}, "
                             "want a mapping from parameters to SourceShardMetaInfo")
        for parameter, info in infos.items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(info, SourceShardMetaInfo):
                raise ValueError(f"[{OP}] source_shard_infos maps a {type(parameter).__name__} to a {type(info).__name__}, "
                                 "want parameters to SourceShardMetaInfo")
        self._infos = list(infos.items())
        self._by_id = {id(parameter): info for parameter, info in self._infos}
        self._names = {id(slot.parameter): slot.name for slot in slots}
        self._unit_mesh = mesh
        self._mesh: DeviceMesh | None = None
        first = ""
        for slot in slots:
            if isinstance(slot.parameter, DTensor):
                raise ValueError(f"[{OP}] parameter {slot.name} is a DTensor, want plain parameters with source_shard_infos")
            own = self._by_id[id(slot.parameter)].mesh if id(slot.parameter) in self._by_id else None
            if own is None:
                continue
            if self._mesh is None:
                self._mesh, first = own, slot.name
            elif own != self._mesh:
                raise ValueError(f"[{OP}] source mesh is {own}, but that of parameter {first} is {self._mesh}, "
                                 f"want one source mesh in a unit (parameter {slot.name})")
        self._joined = mesh if self._mesh is None else joined_mesh(mesh, self._mesh, f"(parameter {first})")

    def largest_numel(self, slot: Slot) -> int:
        """Elements of the largest block of any rank."""
        info = self._by_id.get(id(slot.parameter))
        if info is None or info.mesh is None or info.shape is None or len(info.placements) != info.mesh.ndim:
            return slot.parameter.numel()
        numel = 1
        for dim, size in enumerate(info.shape):
            for axis, placement in enumerate(_settled(info, len(info.shape))):
                if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
                    size = -(-size // info.mesh.size(axis))
            numel *= size
        return numel

    def place(self, slot: Slot, own: Placement) -> None:
        """Describes the DTensor over both meshes. Where both cut one dimension unevenly none can, and the parameter stays plain."""
        info = self._by_id.get(id(slot.parameter))
        if info is None or self._mesh is None:
            return
        placements = _settled(info, len(slot.shape)) if info.mesh is not None else (Replicate(),) * self._mesh.ndim
        if len(placements) != self._mesh.ndim or not all(isinstance(p, (Replicate, Shard, _StridedShard)) for p in placements):
            return
        parts = [1] * len(slot.shape)
        for axis, placement in enumerate(placements):
            if not isinstance(placement, Replicate) and 0 <= placement.dim < len(parts):  # type: ignore[attr-defined]
                parts[placement.dim] *= self._mesh.size(axis)  # type: ignore[attr-defined]
        slot.shape = torch.Size(info.shape or [size * count for size, count in zip(slot.shape, parts)])
        if isinstance(own, Shard) and len(slot.shape) > own.dim and parts[own.dim] > 1:
            shards = self._unit_mesh.size(self._unit_mesh.ndim - 1)
            slot.plain = slot.shape[own.dim] % (parts[own.dim] * shards) != 0
            own = _StridedShard(own.dim, split_factor=parts[own.dim])
        slot.mesh = self._joined
        slot.placements = (*slot.placements[:-1], own, *placements)

    def of(self, slots: list[Slot]) -> list[SourceShardMetaInfo | None]:
        """The layouts of these parameters."""
        return [self._by_id.get(id(slot.parameter)) for slot in slots]

    def engine_meshes(self) -> tuple[Any, Any]:
        """The unit's mesh and the source axes, for the engine. Collective like engine_mesh."""
        joined = engine_mesh(self._joined)
        if self._mesh is None:
            return joined, None
        names: Any = self._joined.mesh_dim_names
        return joined.axes(list(names[:self._unit_mesh.ndim])), joined.axes(list(names[self._unit_mesh.ndim:]))

    def entries(self, source_mesh: Any) -> list[tuple[Any, ...]]:
        """As _C.Options takes them."""
        return [
            (parameter, self._names.get(id(parameter), ""),
             source_mesh if info.mesh is not None and id(parameter) in self._names else None, [as_tuple(placement) for placement in info.placements],
             info.shape, [kind.value for kind in info.copy_gradients], info.origin_is_dtensor)
            for parameter, info in self._infos
        ]


def _settled(info: SourceShardMetaInfo, ndim: int) -> tuple[Placement, ...]:
    """Placements without negative dims."""
    return tuple(from_tuple((kind, dim[0] + ndim, *dim[1:])) if dim and dim[0] < 0 else placement
                 for placement in info.placements for kind, *dim in [as_tuple(placement)])
