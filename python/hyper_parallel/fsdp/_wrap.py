"""fully_shard: maps torch.nn modules onto the engine's slots."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .. import _C
from ._adopt import Description, Entries, State, block_wrapper, local_of, make_parameter, managing_state
from ._collect import OP, Collector, Slot, outermost
from ._comm import default_mesh, engine_mesh
from ._copy import deepcopy_unit
from ._hsdp import HSDPModule
from ._module import FSDPModule, check_bool
from ._policy import HyperMixedPrecisionPolicy, MemoryBudget, MixedPrecisionPolicy, OffloadPolicy
from ._source import Sources, joined_mesh
from ._spmd import SpmdMesh


@dataclass
class _More:
    """What fully_shard of FSDP2 does not have. spmd: the mesh is a part of a larger one; whole: every parameter stays whole."""

    spmd: SpmdMesh | None = None
    whole: bool = False
    replicate_params: Any = None
    comm_fusion: bool = True
    bucket_size: int = -1
    threshold: int = 0
    ragged: bool = False
    replica_init: str | None = None
    source_shard_infos: Any = None


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"[{OP}] mesh is {type(mesh).__name__}, want a torch.distributed.DeviceMesh")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"[{OP}] mesh has {mesh.ndim} dims, want 1 (shard) or 2 (replicate, shard): {mesh}")
    if mesh.device_type != "cpu":
        raise ValueError(f"[{OP}] mesh is on {mesh.device_type}, want cpu: this build has no other backend")
    if mesh.get_coordinate() is None:
        raise ValueError(f"[{OP}] this rank is not part of {mesh}")


def _chosen_dim(slot: Slot, choose: Callable[[nn.Parameter], Any] | None) -> int:
    chosen = choose(slot.parameter) if choose is not None else None
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard):
        raise ValueError(f"[{OP}] shard_placement_fn returned {chosen!r} for parameter {slot.name}, want a Shard or None")
    ndim = len(slot.shape)
    if not -ndim <= chosen.dim < ndim:
        raise ValueError(f"[{OP}] shard_placement_fn returned {chosen} for parameter {slot.name} of shape {tuple(slot.shape)}, "
                         f"want a dim from {-ndim} to {ndim - 1}")
    return chosen.dim % ndim


def _describe(slots: list[Slot], mesh: DeviceMesh, choose: Any, sources: Sources | None, more: _More) -> None:
    replicated = _parameter_ids("replicate_params", more.replicate_params)
    for slot in slots:
        numel = slot.parameter.numel() if sources is None else sources.largest_numel(slot)
        # There is no dimension to cut a scalar on.
        slot.replicated = more.whole or id(slot.parameter) in replicated or len(slot.shape) == 0
        slot.replicated |= numel * slot.parameter.element_size() < more.threshold
        slot.dim = 0 if slot.replicated else _chosen_dim(slot, choose)
        slot.mesh = mesh
        own: Placement = Replicate() if slot.replicated else Shard(slot.dim)
        if more.spmd is not None:
            more.spmd.place(slot, own)
            continue
        if isinstance(slot.parameter, DTensor):
            own = _join_mesh(slot, slot.parameter, own, mesh, more.ragged)
        slot.placements = (own,) if mesh.ndim == 1 else (Replicate(), own)
        if slot.cut is not None:
            slot.placements += tuple(slot.cut.placements)
        elif sources is not None:
            sources.place(slot, own)


def _join_mesh(slot: Slot, parameter: DTensor, own: Placement, mesh: DeviceMesh, ragged: bool) -> Placement:
    """Tensor parallelism has cut the parameter before: its axes follow the mesh's. Returns the placement of the shard axis."""
    where = f"(parameter {slot.name}, a DTensor on {parameter.device_mesh} with {parameter.placements})"
    if ragged:
        raise ValueError(f"[{OP}] shard_layout is \"ragged\", want \"per_parameter\" for parameters that are DTensors {where}")
    parts = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_partial() or not (placement.is_shard() or placement.is_replicate()):
            raise ValueError(f"[{OP}] placement {placement} cannot be cut further, want Shard or Replicate {where}")
        if isinstance(own, Shard) and placement.is_shard(own.dim):
            parts *= parameter.device_mesh.size(axis)
    slot.mesh = joined_mesh(mesh, parameter.device_mesh, where)
    slot.cut = parameter._spec
    if parts == 1 or not isinstance(own, Shard):
        return own
    shards = parts * mesh.size(mesh.ndim - 1)
    if slot.shape[own.dim] % shards != 0:
        raise ValueError(f"[{OP}] dim {own.dim} of size {slot.shape[own.dim]} is cut by both meshes, want a multiple of {shards} {where}")
    return _StridedShard(own.dim, split_factor=parts)


def _parameter_ids(name: str, parameters: Any) -> set[int]:
    if parameters is None:
        return set()
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.Tensor):
        raise TypeError(f"[{OP}] {name} is {type(parameters).__name__}, want a set of parameters")
    ids = set()
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"[{OP}] {name} has a {type(parameter).__name__}, want parameters")
        ids.add(id(parameter))
    return ids


def _check_policies(mp_policy: Any, offload_policy: Any) -> None:
    if not all(hasattr(mp_policy, name) for name in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")):
        raise ValueError(f"[{OP}] mp_policy is {type(mp_policy).__name__}, want a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if not (dtype is None or isinstance(dtype, torch.dtype)):
            raise ValueError(f"[{OP}] mp_policy.{name} is {dtype!r}, want a torch.dtype or None")
    check_bool(OP, "mp_policy.cast_forward_inputs", mp_policy.cast_forward_inputs)
    check_bool(OP, "mp_policy.apply_grad_on_fp32_main_grad", getattr(mp_policy, "apply_grad_on_fp32_main_grad", False))
    if offload_policy is not None and not any(cls.__name__ == "OffloadPolicy" for cls in type(offload_policy).__mro__):
        raise ValueError(f"[{OP}] offload_policy is {type(offload_policy).__name__}, want an OffloadPolicy")
    check_bool(OP, "offload_policy.pin_memory", getattr(offload_policy, "pin_memory", False))


def _check_choices(reshard_after_forward: Any, shard_placement_fn: Any, comm_fusion: Any, bucket_size: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, (int, MemoryBudget)):
        raise ValueError(f"[{OP}] reshard_after_forward is {reshard_after_forward!r}, want a bool, an int or None")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise ValueError(f"[{OP}] shard_placement_fn is {type(shard_placement_fn).__name__}, want a function or None")
    check_bool(OP, "comm_fusion", comm_fusion)
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, int):
        raise ValueError(f"[{OP}] bucket_size is {bucket_size!r}, want a number of bytes, or -1")


def _refuse_managed(collector: Collector) -> None:
    for module in collector.modules:
        for name in module._parameters:
            state = managing_state(module, name)
            if state is not None:
                raise ValueError(f"[{OP}] parameter {name} of {type(module).__name__} belongs to unit {state.unit.name()} already, want "
                                 "fully_shard on inner modules first and on the modules around them last")


_classes: dict[tuple[type, type], type] = {}


def _plain_class(cls: type) -> type:
    """Of a sharded module's class that from which fully_shard has made it."""
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1]


def _deepcopy(self: Any, memo: Any) -> Any:
    return deepcopy_unit(self, memo, _shard, _plain_class)


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    raise RuntimeError(f"[pickle] {type(self).__name__} is sharded and cannot be pickled or copied by copy.copy, want its state_dict(), "
                       "or copy.deepcopy")


def _sharded_class(base: type, cls: type, prefix: str) -> type:
    if (base, cls) not in _classes:
        body = {"__deepcopy__": _deepcopy, "__reduce_ex__": _refuse_pickle, "__module__": cls.__module__, "__qualname__": f"{prefix}{cls.__qualname__}"}
        _classes[base, cls] = type(f"{prefix}{cls.__name__}", (base, cls), body)
    return _classes[base, cls]


def _mesh_of(mesh: Any, slots: list[Slot], more: _More) -> DeviceMesh:
    """[replicate, shard], or shard alone."""
    if mesh is None and more.spmd is None:
        if any(isinstance(slot.parameter, DTensor) for slot in slots):
            raise ValueError(f"[{OP}] mesh is None, want the data-parallel part of the mesh: there are parameters that are DTensors")
        mesh = default_mesh("replicate" if more.whole else None)
    if more.spmd is not None:
        for slot in slots:
            more.spmd.check(slot)
        mesh = more.spmd.data
    _check_mesh(mesh)
    if more.whole and mesh.ndim != 1:
        raise ValueError(f"[{OP}] mesh has {mesh.ndim} dims, want 1 to replicate: {mesh}")
    return mesh


def _options(slots: list[Slot], tensors: list[Any], meshes: tuple[Any, Any], reshard_after_forward: Any, mp_policy: Any,
             offload_policy: Any, sources: Sources | None, more: _More) -> Any:
    budget = reshard_after_forward.bytes if isinstance(reshard_after_forward, MemoryBudget) else None
    return _C.Options(
        mesh=meshes[0],
        reshard_after_forward=None if budget is not None else reshard_after_forward,
        memory_budget=budget,
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        output_dtype=mp_policy.output_dtype,
        cast_forward_inputs=mp_policy.cast_forward_inputs,
        main_grads=getattr(mp_policy, "apply_grad_on_fp32_main_grad", False),
        cpu_offload=any(cls.__name__ == "CPUOffloadPolicy" for cls in type(offload_policy).__mro__),
        pin_memory=bool(getattr(offload_policy, "pin_memory", False)),
        replicate_params=[tensor for slot, tensor in zip(slots, tensors) if slot.replicated],
        comm_fusion=more.comm_fusion,
        bucket_size=more.bucket_size,
        ragged=more.ragged,
        replica_init=more.replica_init or "",
        source_shard_infos=sources.entries(meshes[1]) if sources is not None else None,
    )


def _shard(
    base: type,
    prefix: str,
    module: Any,
    mesh: Any,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Any,
    more: _More,
) -> Any:
    given = dict(locals())
    roots, _ = outermost(module)
    _check_choices(reshard_after_forward, shard_placement_fn, more.comm_fusion, more.bucket_size)
    _check_policies(mp_policy, offload_policy)
    collector = Collector(_parameter_ids("ignored_params", ignored_params))
    for member, root in enumerate(roots):
        collector.collect(root, member)
    _refuse_managed(collector)
    slots = collector.slots
    mesh = _mesh_of(mesh, slots, more)
    sources = None if more.source_shard_infos is None else Sources(more.source_shard_infos, slots, mesh)
    _describe(slots, mesh, shard_placement_fn, sources, more)
    # What the engine shards: of a DTensor this rank's block.
    tensors: list[Any] = [
        slot.parameter if slot.cut is None else nn.Parameter(local_of(slot.parameter), requires_grad=slot.requires_grad)
        for slot in slots
    ]
    meshes = sources.engine_meshes() if sources is not None else (engine_mesh(mesh), None)
    options = _options(slots, tensors, meshes, reshard_after_forward, mp_policy, offload_policy, sources, more)
    described = [
        Description(slot.name, slot.shape, slot.mesh or mesh, slot.placements, slot.places,
                    ragged=slot.plain or (more.ragged and not slot.replicated),
                    cut=slot.cut is not None and len(slot.data_axes) < slot.cut.mesh.ndim)
        for slot in slots
    ]

    def wrap(i: int, local: torch.Tensor) -> Any:
        if not described[i].ragged:
            return make_parameter(slots[i], local)
        local.__class__ = nn.Parameter
        return None

    entries = Entries(described)
    unit = _C.make_unit(
        type(roots[0]).__name__,
        [
            (slot.name, tensor, slot.member, slot.dim, slot.places, block_wrapper(slot.cut) if slot.cut is not None else None,
             slot.data_axes)
            for slot, tensor in zip(slots, tensors)
        ],
        options,
        list(collector.children.values()),
        len(roots),
        wrap,
        entries.adopt,
    )
    state = State(unit, mesh, entries, more.whole or mesh.ndim == 2)
    # Without references to modules and parameters.
    state.options = given | dict.fromkeys(("module", "mesh", "shard_placement_fn", "ignored_params"))
    state.options["more"] = replace(more, replicate_params=None, source_shard_infos=None)
    state.sources = None if sources is None else sources.of(slots)
    state.cuts = [slot.cut for slot in slots]
    state.dims = [slot.dim for slot in slots]
    state.replicated = [slot.replicated for slot in slots]
    state.began = [(slot.requires_grad, slot.parameter.dtype) for slot in slots]
    _attach(state, roots, collector.modules, base, prefix)
    return module


def _attach(state: State, roots: list[nn.Module], owners: list[nn.Module], base: type, prefix: str) -> None:
    for member, root in enumerate(roots):
        root._hyper_parallel_state = state  # type: ignore[assignment]
        root._hyper_parallel_member = member  # type: ignore[assignment]
        before = root.register_forward_pre_hook(state.unit.pre_hook(member), prepend=True, with_kwargs=True)
        after = root.register_forward_hook(state.unit.post_hook(member), always_call=True)
        state.roots.append(weakref.ref(root))
        state.hooks.append({before.id, after.id})
        root.__class__ = _sharded_class(base, type(root), prefix)
    for owner in owners:
        owner.register_state_dict_pre_hook(state.before_state_dict)
        owner.register_load_state_dict_pre_hook(state.before_state_dict)
        owner.register_load_state_dict_post_hook(state.after_load)
    # The gradient of a look-up does not read the table; what a subclass does is unknown.
    if len(roots) == 1 and _plain_class(type(roots[0])) is nn.Embedding:
        state.unit.set_unshard_in_backward(False)


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shards the parameters of ``module`` over a mesh and gathers them just in time for its forward and backward, in place.

    Parameters of inner modules on which it was called before stay with those: call it on inner modules first, on the whole model
    last. Afterwards ``module.parameters()`` are DTensors over this rank's shards; their gradients are averaged over all ranks.

    Args:
        module: a module, or a list of modules that form one unit: gathered for the first that runs, freed after the last.
        mesh: 1-D: shards over it. 2-D: axis 0 replicates, axis 1 shards. Default: one axis over all ranks.
        reshard_after_forward: free the gathered parameters after forward (True), keep them (False), or cut them over groups of that
            many ranks (int, a factor of the shard axis). Default: True, but False for the root.
        shard_placement_fn: parameter -> Shard(dim) to cut it on, or None for dim 0. Sizes need not divide.
        mp_policy, offload_policy: see there; those of torch are taken as well.
        ignored_params: parameters that are left alone.
        dp_mesh_dims: which axes of ``mesh`` are data parallelism's. ``mesh`` is then the mesh of all parallelism together, and
            all parameters are DTensors on it, with Replicate on those axes; afterwards they are DTensors on the same mesh.
    Returns:
        ``module``, whose class is now a subclass of FSDPModule.
    Raises, and leaves the module as it was:
        ValueError: no module, wrapped before, an argument of another type or out of range, a mesh that does not fit, a parameter
            on another device, of another unit, of a class with ``fsdp_pre_all_gather``, ``fsdp_post_all_gather`` or
            ``__torch_dispatch__``, or a DTensor whose mesh is no other part of the same one.
        TypeError: ``ignored_params`` has something that is no tensor.

    Collective among the ranks of the mesh the first time that it is used.
    """
    if isinstance(reshard_after_forward, MemoryBudget):
        raise ValueError(f"[{OP}] reshard_after_forward is a MemoryBudget, which hyper_parallel.fully_shard takes; "
                         "want a bool, an int or None")
    more = _More(spmd=None if dp_mesh_dims is None else SpmdMesh(mesh, dp_mesh_dims))
    if more.spmd is not None and not more.spmd.shard_axes:
        more.whole = True
        if shard_placement_fn is not None:
            raise ValueError(f"[{OP}] shard_placement_fn is given, want None: dp_mesh_dims has no axis that shards")
    return _shard(FSDPModule, "FSDP", module, mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy,
                  ignored_params, more)


class ReplicateModule(FSDPModule):
    """Methods of a module that replicate was called on."""


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Data parallelism without sharding: every rank has all parameters of ``module``, and their gradients are averaged.

    The name and the signature of torch.distributed._composable.replicate_with_fsdp. See fully_shard for what is not listed here.

    Args:
        mesh: 1-D. Default: one axis "replicate" over all ranks.
        dp_mesh_dims: only ``replicate`` may be set.
    Returns:
        ``module``, whose class is now a subclass of ReplicateModule; its parameters are DTensors with Replicate.
    Raises what fully_shard raises, and ValueError for axes that shard; leaves the module as it was then.

    Collective among the ranks of the mesh the first time that it is used.
    """
    more = _More(spmd=None if dp_mesh_dims is None else SpmdMesh(mesh, dp_mesh_dims), whole=True)
    if more.spmd is not None and more.spmd.shard_axes:
        raise ValueError(f"[{OP}] dp_mesh_dims has axes that shard, want replicate alone: fully_shard shards")
    return _shard(ReplicateModule, "Replicate", module, mesh, None, None, mp_policy, offload_policy, ignored_params, more)


def hyper_fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | MemoryBudget | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = HyperMixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    replicate_params: set[nn.Parameter] | None = None,
    comm_fusion: bool = True,
    comm_fusion_zero_copy: bool | None = None,
    source_shard_infos: Any = None,
    bucket_size: int = -1,
    threshold: int = 0,
    shard_layout: str = "per_parameter",
    replica_init: str | None = None,
) -> Any:
    """HyperParallel's fully_shard. See hyper_parallel.fsdp.fully_shard for what is not listed here.

    Args:
        reshard_after_forward: also a MemoryBudget.
        replicate_params: parameters that stay whole on every rank; their gradients are averaged over all ranks of the mesh.
        comm_fusion: one collective for each dtype of a unit, or one for each parameter.
        comm_fusion_zero_copy: shards always lie in one flat buffer, so that it changes nothing; True needs comm_fusion.
        source_shard_infos: a mapping from every parameter of the unit, and no other, to a SourceShardMetaInfo: the parameters hold
            this rank's blocks of tensors that tensor or expert parallelism has cut. They are then DTensors on both meshes, but for
            those of which both meshes cut one dimension unevenly: those are plain tensors. Modules compute with plain blocks.
        bucket_size: most bytes of gathered parameters in one collective; -1: no limit.
        threshold: parameters of fewer bytes stay whole, like ``replicate_params``.
        shard_layout: "per_parameter", or "ragged": a unit's parameters are one buffer, cut into equal parts at row ends. Nothing is
            copied after a gather; the parameters are then plain tensors, this rank's rows, and no DTensors.
        replica_init: what the first forward does about replicas that may have begun with different values: None, "check" (ValueError
            if they differ), or "broadcast" (the first replica's are sent to the others).
    Returns:
        ``module``, whose class is now a subclass of HSDPModule.
    Raises, and leaves the module as it was, what hyper_parallel.fsdp.fully_shard raises, and:
        ValueError: ``comm_fusion_zero_copy`` or ``bucket_size`` without ``comm_fusion``, ``bucket_size`` 0, ``threshold`` below 0,
            another ``shard_layout`` or ``replica_init``, DTensors in the ragged layout, ``source_shard_infos`` that lack a
            parameter, have another one, or do not fit.
        TypeError: ``replicate_params`` has something that is no tensor.

    Collective among the ranks of the mesh the first time that it is used.
    """
    if comm_fusion_zero_copy is not None:
        check_bool(OP, "comm_fusion_zero_copy", comm_fusion_zero_copy)
    if comm_fusion_zero_copy and not comm_fusion:
        raise ValueError(f"[{OP}] comm_fusion_zero_copy is True without comm_fusion, want comm_fusion too")
    if shard_layout not in ("per_parameter", "ragged"):
        raise ValueError(f"[{OP}] shard_layout is {shard_layout!r}, want \"per_parameter\" or \"ragged\"")
    if replica_init not in (None, "check", "broadcast"):
        raise ValueError(f"[{OP}] replica_init is {replica_init!r}, want None, \"check\" or \"broadcast\"")
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
        raise ValueError(f"[{OP}] threshold is {threshold!r}, want a number of bytes")
    more = _More(replicate_params=replicate_params, comm_fusion=comm_fusion, bucket_size=bucket_size, threshold=threshold,
                 ragged=shard_layout == "ragged", replica_init=replica_init, source_shard_infos=source_shard_infos)
    return _shard(HSDPModule, "HSDP", module, mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy,
                  ignored_params, more)
