"""Meshes of torch as the engine's."""
from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import _C

# Of the default process group that is there now.
_group: Any = None
_world: Any = None
_meshes: dict[tuple[Any, ...], Any] = {}
# samehost, map_shards, huge_pages, first_touch: see init_process_group.
_memory: tuple[bool | None, bool | None, bool, bool] = (None, None, False, False)


def _timeout(group: Any) -> timedelta:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # backends without options
        return dist.distributed_c10d.default_pg_timeout


def world() -> Any:
    """The ranks of the default process group: they meet in its store."""
    global _group, _world
    group = dist.distributed_c10d._get_default_group()
    if group is _group:
        return _world
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    fake = dist.get_backend() == "fake"
    if not fake:
        # A store can serve several default groups, one after the other.
        turn = store.add(f"hyper_parallel/turn/{rank}", 1)
        store = dist.PrefixStore(f"hyper_parallel/{turn}", store)
    _world = _C.World(store, rank, size, int(_timeout(group).total_seconds() * 1000), fake, *_memory)
    _group = group
    _meshes.clear()
    return _world


def init_process_group(
    backend: str = "gloo",
    *,
    samehost: bool | None = None,
    map_shards: bool | None = None,
    huge_pages: bool = False,
    first_touch: bool = False,
    **options: Any,
) -> None:
    """Says how ranks of one host talk, and makes torch's default process group if there is none.

    Not needed for the defaults. Call it before the first fully_shard, alike on all ranks.

    Args:
        backend, options: of torch.distributed.init_process_group.
        samehost: groups whose ranks all run on one host talk through memory that they share; False: through the network. Default:
            what the environment variable HP_SAMEHOST says (0, 1 or copy), else True.
        map_shards: such groups map the shards of units in the ragged layout into each other; False: they are copied. Default: not if
            HP_SAMEHOST is "copy".
        huge_pages: ask for huge pages for that memory.
        first_touch: buffers are written to when they are allocated, not when they are first used.
    Raises ValueError: no bool; units are there already; options for a process group that is there already.

    Collective if torch's group is made; local otherwise.
    """
    global _memory
    for name, value in (("samehost", samehost), ("map_shards", map_shards), ("huge_pages", huge_pages), ("first_touch", first_touch)):
        if not isinstance(value, bool) and not (value is None and name in ("samehost", "map_shards")):
            raise ValueError(f"[init_process_group] {name} is {value!r}, want True or False")
    if _group is not None and dist.is_initialized() and _group is dist.distributed_c10d._get_default_group():
        raise ValueError("[init_process_group] fully_shard has connected the ranks of this process group already, want it before that")
    if dist.is_initialized() and options:
        raise ValueError(f"[init_process_group] options {sorted(options)} for a process group that is there already, want none")
    if not dist.is_initialized():
        dist.init_process_group(backend, **options)
    _memory = (samehost, map_shards, huge_pages, first_touch)


def default_mesh(name: str | None = None) -> DeviceMesh:
    """One axis over the world, on the CPU. Makes the default process group if there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=None if name is None else (name,))


def local_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> Any:
    """The same ranks for the engine, not connected. Local."""
    return _C.Mesh(world(), mesh.device_type, list(mesh.mesh.shape), mesh.mesh.flatten().tolist(), list(names), False)


def engine_mesh(mesh: DeviceMesh) -> Any:
    """The same ranks for the engine. Collective among them the first time; raises ValueError for what the engine has no use for."""
    owner = world()
    names = mesh.mesh_dim_names or (("dp_shard",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    shape, ranks = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
    key = (mesh.device_type, shape, ranks, names)
    if key not in _meshes:
        _meshes[key] = _C.Mesh(owner, mesh.device_type, list(shape), list(ranks), list(names))
    return _meshes[key]
