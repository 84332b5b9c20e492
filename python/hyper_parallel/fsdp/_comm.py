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
    _world = _C.World(store, rank, size, int(_timeout(group).total_seconds() * 1000), fake)
    _group = group
    _meshes.clear()
    return _world


def default_mesh() -> DeviceMesh:
    """One axis over the world, on the CPU. Makes the default process group if there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def engine_mesh(mesh: DeviceMesh) -> Any:
    """The same ranks for the engine. Collective among them the first time; raises ValueError for what the engine has no use for."""
    owner = world()
    names = mesh.mesh_dim_names or (("dp_shard",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    shape, ranks = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
    key = (mesh.device_type, shape, ranks, names)
    if key not in _meshes:
        _meshes[key] = _C.Mesh(owner, mesh.device_type, list(shape), list(ranks), list(names))
    return _meshes[key]
