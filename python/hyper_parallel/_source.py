"""Source layouts: from a plan of tensor and expert parallelism to what fully_shard wants to know of it."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from . import _C
from .fsdp._collect import Collector, outermost
from .fsdp._comm import local_mesh
from .fsdp._module import FSDPModule
from .fsdp._source import CopyGradient, SourceShardMetaInfo, as_tuple, from_tuple

Pairs = Sequence[tuple[str, str]]


@dataclass
class ModuleShardingSpec:
    """The parameters of one module: name below the module -> mesh axis -> placement. Axes that are not named replicate.

    Args:
        ep_size: above 0: the module holds routed experts, cut over that many ranks.
        partial_gradient_axes: axes along which ranks compute summands of the gradients of parameters that the axis replicates.
    """

    params: dict[str, dict[str, Placement]] = field(default_factory=dict)
    ep_size: int = 0
    partial_gradient_axes: tuple[str, ...] = ()


@dataclass
class ShardingPlan:
    """Module -> parameter -> axis -> placement, by full names.

    A description, not a program: modules are cut by whoever wrote them. Patterns, TOML and hp::parallelize are C++.

    Args:
        tied_pairs: full names of parameters that are one tensor. If one is cut and the other is not, both are.
        axis_names: source axes, in the order of placements where no mesh tells it.
        expert_axis: the axis that cuts routed experts.
    """

    modules: dict[str, ModuleShardingSpec] = field(default_factory=dict)
    tied_pairs: Pairs = ()
    axis_names: tuple[str, ...] = ()
    expert_axis: str = "ep"


def _mesh_names(mesh: DeviceMesh, plan: ShardingPlan, expert: bool) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ((plan.expert_axis,) if expert else tuple(plan.axis_names))
    if len(names) != mesh.ndim:
        raise ValueError(f"[build_source_shard_info] {mesh} has no mesh_dim_names and the plan has the axes {names}, want one for each dim")
    return tuple(names)


def _part(mesh: DeviceMesh | None, names: list[str]) -> DeviceMesh | None:
    if mesh is None or not names:
        return None
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]


def build_source_shard_info(
    plan: ShardingPlan,
    dense_source_mesh: DeviceMesh | None,
    *,
    expert_source_mesh: DeviceMesh | None = None,
    tied_pairs: Pairs | None = None,
) -> dict[str, SourceShardMetaInfo]:
    """The source layout of every parameter that the plan names, by full name.

    One placement for each source axis of its mesh, in mesh order; Replicate where the plan says nothing. Parameters that the expert
    axis cuts lie on the expert mesh, the others on the dense one. Axes of FSDP and pipelines (dp, dp_replicate, dp_shard, dp_cp, cp,
    pp, fsdp_replicate, fsdp_shard, edp, edp_replicate, edp_shard, ep_shard) are no source axes. Local.

    Args:
        dense_source_mesh: a whole mesh or its source axes; None: there is none.
        expert_source_mesh: of routed experts.
        tied_pairs: instead of those of the plan.
    Raises ValueError, all problems at once: cuts on axes that FSDP owns or that the mesh lacks, axes that nobody knows, placements
    that are no cut, experts without mesh or of another size, tied parameters that contradict each other.
    """
    modules = [
        (name, {parameter: {axis: as_tuple(placement) for axis, placement in axes.items()} for parameter, axes in spec.params.items()},
         spec.ep_size, list(spec.partial_gradient_axes))
        for name, spec in plan.modules.items()
    ]
    dense = None if dense_source_mesh is None else local_mesh(dense_source_mesh, _mesh_names(dense_source_mesh, plan, False))
    expert = None if expert_source_mesh is None else local_mesh(expert_source_mesh, _mesh_names(expert_source_mesh, plan, True))
    native = _C.ShardingPlan(modules, [(a, b) for a, b in plan.tied_pairs], list(plan.axis_names), plan.expert_axis)
    pairs = None if tied_pairs is None else [(a, b) for a, b in tied_pairs]
    return {
        name: SourceShardMetaInfo(
            _part(expert_source_mesh if on_expert_mesh else dense_source_mesh, axes),
            tuple(from_tuple(placement) for placement in placements),
            copy_gradients=tuple(CopyGradient(kind) for kind in kinds),
        )
        for name, axes, on_expert_mesh, placements, kinds in _C.build_source_shard_info(native, dense, expert, pairs)
    }


def build_source_shard_info_by_param(
    module: nn.Module, named: Mapping[str, SourceShardMetaInfo]
) -> dict[torch.Tensor, SourceShardMetaInfo]:
    """Source layouts by name, resolved to the parameters of a model that is already cut. Local.

    Raises ValueError, all problems at once: a name that is no parameter, two names of one parameter with different layouts.
    """
    problems: list[str] = []
    parameters = dict(module.named_parameters(remove_duplicate=False))
    infos: dict[torch.Tensor, SourceShardMetaInfo] = {}
    names: dict[int, str] = {}
    for name, info in named.items():
        parameter = parameters.get(name)
        if parameter is None:
            problems.append(f"{name} is no parameter of the model")
        elif infos.setdefault(parameter, info) != info:
            problems.append(f"{names[id(parameter)]} and {name} are one parameter, want one layout")
        else:
            names[id(parameter)] = name
    if problems:
        raise ValueError("[build_source_shard_info_by_param] " + "; ".join(problems))
    return infos


def managed_parameters(module: Any, ignored_params: set[nn.Parameter] | None = None) -> list[tuple[str, nn.Parameter]]:
    """The parameters that fully_shard(module, ignored_params=...) would manage, with the names that they have in the unit. Local.

    Raises ValueError: no module, or one that fully_shard refuses for its parameters.
    """
    collector = Collector({id(parameter) for parameter in ignored_params or ()})
    for member, root in enumerate(outermost(module)[0]):
        collector.collect(root, member)
    return [(slot.name, slot.parameter) for slot in collector.slots]


def default_source_shard_info(mesh: DeviceMesh) -> SourceShardMetaInfo:
    """What a parameter that no plan names has in a unit on ``mesh``: copies along all axes that its root has beside those of FSDP. Local.

    Raises ValueError: there are none.
    """
    root = mesh._get_root_mesh()
    names = [name for name in root.mesh_dim_names or () if not _C.is_fsdp_axis(name)]
    if not names:
        raise ValueError(f"[default_source_shard_info] no axis of {root} is a source axis, want one beside those of FSDP, e.g. tp")
    return SourceShardMetaInfo(_part(root, names), (Replicate(),) * len(names))


def managed_source_shard_infos(
    module: Any,
    infos: Mapping[Any, SourceShardMetaInfo] | None,
    *,
    mesh: DeviceMesh,
    ignored_params: set[nn.Parameter] | None = None,
) -> dict[torch.Tensor, SourceShardMetaInfo] | None:
    """``source_shard_infos`` for a unit: the entries of the parameters that fully_shard would manage. None in, None out. Local.

    Parameters without entry are copies along all source axes of the unit, which are those of its other parameters, or else
    default_source_shard_info(mesh).

    Args:
        module, mesh, ignored_params: as for fully_shard.
        infos: by parameter.
    Raises ValueError: no source axis is left for a parameter without entry, parameters of the unit on different source meshes.
    """
    if infos is None:
        return None
    given = {id(parameter): info for parameter, info in infos.items()}
    parameters = managed_parameters(module, ignored_params)
    found = [(name, given[id(parameter)].mesh) for name, parameter in parameters if id(parameter) in given]
    meshes = [(name, source) for name, source in found if source is not None]
    for name, source in meshes:
        if source != meshes[0][1]:
            raise ValueError(f"[managed_source_shard_infos] parameter {name} lies on {source}, but {meshes[0][0]} on {meshes[0][1]}, "
                             "want one source mesh in a unit: wrap experts as units of their own")
    result: dict[torch.Tensor, SourceShardMetaInfo] = {}
    for _, parameter in parameters:
        own = given.get(id(parameter))
        if own is None:
            axes = meshes[0][1] if meshes else default_source_shard_info(mesh).mesh
            assert axes is not None
            own = SourceShardMetaInfo(axes, (Replicate(),) * axes.ndim, shape=tuple(parameter.shape))
        result[parameter] = own
    return result


def set_source_gradient_factor(module: nn.Module, dense_mesh: DeviceMesh, *, loss_parallel: bool = False) -> float:
    """For models whose boundaries compute the gradients of the sum of all ranks' losses (the adjoint of every communication): all units
    add gradients and multiply them by 1 / (data-parallel ranks x ranks that compute the same loss). Returns that factor.

    Local; call it alike on all ranks, after the last fully_shard.

    Args:
        module: the outermost module that fully_shard was called on.
        dense_mesh: the whole dense mesh, with names. Expert axes are not part of it.
        loss_parallel: each rank of the source axes computes its own part of the loss; False: all compute the same loss.
    Raises ValueError: no sharded module, a mesh without names.
    """
    if not isinstance(module, FSDPModule):
        raise ValueError(f"[set_source_gradient_factor] module is {type(module).__name__}, want one that fully_shard was called on")
    if not isinstance(dense_mesh, DeviceMesh) or dense_mesh.mesh_dim_names is None:
        raise ValueError(f"[set_source_gradient_factor] dense_mesh is {dense_mesh!r}, want a DeviceMesh with mesh_dim_names")
    mesh = local_mesh(dense_mesh, tuple(dense_mesh.mesh_dim_names))
    return _C.set_source_gradient_factor(module._hyper_parallel_state.unit, mesh, loss_parallel)
