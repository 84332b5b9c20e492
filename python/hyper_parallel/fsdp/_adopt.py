"""What is registered around the engine's shards, and what programs may register in its place."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ._collect import OP, Slot


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


def dtensor_over(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> Any:
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, _contiguous_stride(shape), local.dtype))
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)


def local_of(parameter: Any) -> torch.Tensor:
    return parameter._local_tensor.detach()


def block_wrapper(cut: DTensorSpec) -> Callable[[torch.Tensor], Any]:
    """What a module computes with: a parameter that is a DTensor as it was before."""

    def wrap(local: torch.Tensor) -> Any:
        whole = dtensor_over(local, cut.mesh, cut.placements, cut.shape)
        whole._is_param = True
        return whole

    return wrap


def make_parameter(slot: Slot, local: torch.Tensor) -> nn.Parameter:
    assert slot.mesh is not None
    whole = dtensor_over(local, slot.mesh, slot.placements, slot.shape)
    parameter: Any = nn.Parameter(whole, requires_grad=slot.requires_grad)
    parameter._local_tensor = local  # the Parameter made an alias of it
    parameter.__dict__.update({name: value for name, value in slot.parameter.__dict__.items() if name != "_is_param"})
    return parameter


def _register(unit: Any, i: int, slot: Description, entry: Any) -> None:
    """Makes `entry`, a DTensor, the parameter around the engine's shard."""
    if not slot.ragged:
        entry._local_tensor = unit.sharded(i)
    unit.replace(i, entry)


def _own_part(slot: Description, whole: torch.Tensor) -> torch.Tensor:
    mesh = slot.mesh
    coordinate: Any = mesh.get_coordinate()
    part = whole
    for axis, placement in enumerate(slot.placements):
        if isinstance(placement, Shard):
            chunks = torch.chunk(part, mesh.size(axis), placement.dim)
            mine = coordinate[axis]
            part = chunks[mine] if mine < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


class Entries:
    """The places where modules register a unit's parameters, and what may stand there in place of ours.

    A conversion of a module (``to``, ``to_empty``) changes what is inside of our DTensors, and ``load_state_dict(assign=True)``
    registers other ones: their values are taken over. Everything else that is registered there is an error, before it is read.
    """

    def __init__(self, slots: list[Description]) -> None:
        self.slots = slots
        self._admitting = False

    @contextlib.contextmanager
    def admitting(self) -> Iterator[None]:
        self._admitting = True
        try:
            yield
        finally:
            self._admitting = False

    def registered(self) -> Iterator[tuple[int, Any]]:
        for i, slot in enumerate(self.slots):
            for dictionary, key in slot.places:
                yield i, dictionary.get(key)

    def check(self, unit: Any, i: int, entry: Any) -> None:
        """Whether the values of `entry` can become those of slot i. Raises ValueError."""
        slot = self.slots[i]
        where = f"(parameter {slot.name} of unit {unit.name()})"
        if entry is None:
            raise ValueError(f"[{OP}] a parameter is not registered any more, want it where it was: parametrize, prune and take modules "
                             f"apart before fully_shard {where}")
        if not isinstance(entry, torch.Tensor):
            raise ValueError(f"[{OP}] a parameter was replaced by {type(entry).__name__}, want a tensor {where}")
        if not self._admitting and entry is not unit.parameter(i):
            advice = ("the plain module exported, before fully_shard" if torch.compiler.is_exporting() else
                      "new values through load_state_dict, copy_ or set_model_state_dict; torch.func.functional_call works with the "
                      "module's own parameters only")
            raise ValueError(f"[{OP}] a parameter was replaced by another {type(entry).__name__}, want {advice} {where}")
        if entry.is_meta and not unit.sharded(i).is_meta:
            raise ValueError(f"[{OP}] a parameter was moved to the meta device, want one with values {where}")
        if isinstance(entry, DTensor):
            if entry.shape != slot.shape:
                raise ValueError(f"[{OP}] a parameter was replaced by one of shape {tuple(entry.shape)}, want {tuple(slot.shape)} {where}")
        elif not slot.ragged and entry.shape != unit.sharded(i).shape:
            if entry.shape != slot.shape:
                raise ValueError(f"[{OP}] a parameter was replaced by a tensor of shape {tuple(entry.shape)}, want {tuple(slot.shape)} "
                                 f"{where}")
            if slot.mesh.ndim > 2 or any(isinstance(placement, _StridedShard) for placement in slot.placements):
                raise ValueError(f"[{OP}] a parameter was replaced by a plain tensor, want a DTensor: two meshes cut it {where}")

    def adopt(self, unit: Any, i: int, entry: Any) -> None:
        """A place has another tensor than our own, or ours has another local tensor. The unit calls it."""
        self.check(unit, i, entry)
        slot, sharded, own = self.slots[i], unit.sharded(i), unit.parameter(i)
        same = False
        with torch.no_grad():
            if isinstance(entry, DTensor):
                same = entry.device_mesh == slot.mesh and tuple(entry.placements) == slot.placements
                values = entry._local_tensor if same else entry.redistribute(slot.mesh, slot.placements)._local_tensor
            else:
                # The engine cuts whole ones of the ragged layout.
                values = entry.detach()
                if not slot.ragged and values.shape != sharded.shape:
                    values = _own_part(slot, values)
            if sharded.is_meta and not values.is_meta:
                unit.to_empty()
                sharded.copy_(values)
            elif values is not sharded:
                sharded.data = values.detach()  # the engine takes the values over, and follows another dtype
        if not slot.ragged and same and isinstance(entry, nn.Parameter):
            _register(unit, i, slot, entry)
            return
        own.requires_grad_(entry.requires_grad)
        unit.replace(i, own)


class State:
    """What a sharded module knows of its unit. Shared by the modules of a list."""

    def __init__(self, unit: Any, mesh: DeviceMesh, entries: Entries, replicates: bool) -> None:
        self.unit = unit
        self.mesh = mesh
        self.entries = entries
        self.replicates = replicates
        # What a copy of the unit is made from.
        self.roots: list[Callable[[], nn.Module | None]] = []
        self.hooks: list[set[int]] = []  # ids of the hooks of each of them
        self.options: dict[str, Any] = {}  # arguments of fully_shard
        self.cuts: list[DTensorSpec | None] = []
        self.sources: list[Any] | None = None  # SourceShardMetaInfo of each slot
        self.dims: list[int] = []
        self.replicated: list[bool] = []
        self.began: list[tuple[bool, torch.dtype]] = []  # requires_grad and dtype then: they decide which parameters lie together
        self.switches: dict[str, tuple[Any, ...]] = {}  # setters of the unit that were called
        self.prefetch: dict[str, list[Any]] = {}

    @property
    def slots(self) -> list[Description]:
        return self.entries.slots

    def after_conversion(self) -> None:
        """Module._apply has converted, or replaced, the shards that are registered."""
        began_on_meta = any(self.unit.sharded(i).is_meta for i in range(len(self.slots)))
        entries = [places[0][0][places[0][1]] for places in (slot.places for slot in self.slots)]
        if began_on_meta and not any(entry.is_meta for entry in entries):
            # to_empty: there are no values to take over.
            self.unit.to_empty()
            for i, entry in enumerate(entries):
                _register(self.unit, i, self.slots[i], entry)
        with self.entries.admitting():
            self.unit.follow()

    def before_state_dict(self, *_: Any) -> None:
        if self.unit.shows_gathered():
            self.unit.reshard()

    def after_load(self, *_: Any) -> None:
        """A module that registers parameters of ours has loaded a state dictionary."""
        with self.entries.admitting():
            try:
                for i, entry in self.entries.registered():
                    self.entries.check(self.unit, i, entry)
            except ValueError:
                for i in range(len(self.slots)):
                    self.unit.replace(i, self.unit.parameter(i))
                raise
            self.unit.follow()

    def __deepcopy__(self, memo: Any) -> Any:
        # Hooks in a copy of a module of the unit without the unit: its parameters are DTensors of its own.
        return State(_NoUnit(), self.mesh, Entries([]), self.replicates)

    def __reduce__(self) -> Any:
        raise RuntimeError("[pickle] a sharded module cannot be pickled, want its state_dict()")


class _NoUnit:
    def shows_gathered(self) -> bool:
        return False

    def follow(self) -> None: ...


def managing_state(module: nn.Module, name: str) -> State | None:
    """Of the unit that manages what `module` registers under this name."""
    for hook in module._state_dict_pre_hooks.values():
        state = getattr(hook, "__self__", None)
        if isinstance(state, State) and any(
            dictionary is module._parameters and key == name for slot in state.slots for dictionary, key in slot.places
        ):
            return state
    return None
