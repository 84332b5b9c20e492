"""Functions over a whole sharded model."""
from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import _C
from .fsdp._module import FSDPModule


def unit_of(op: str, module: nn.Module) -> Any:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"[{op}] module is {type(module).__name__}, want one that fully_shard was called on")
    return module._hyper_parallel_state.unit


class ZeroLevel(enum.IntEnum):
    """What is sharded: optimizer state; gradients, too; parameters, too."""

    LEVEL1 = 1
    LEVEL2 = 2
    LEVEL3 = 3


def set_zero_level(module: nn.Module, level: ZeroLevel | int, last_micro_batch: bool = True) -> None:
    """Sets the switches of the whole tree for the next micro-batch: set_reshard_after_forward, set_reshard_after_backward,
    set_requires_gradient_sync and set_requires_all_reduce.

    Local; call it before every micro-batch, alike on all ranks.

    Args:
        module: the outermost module that fully_shard was called on.
        last_micro_batch: its backward completes the gradients.
    Raises ValueError: no sharded module, another level.
    """
    if isinstance(level, bool) or level not in list(ZeroLevel):
        raise ValueError(f"[set_zero_level] level is {level!r}, want 1, 2 or 3")
    _C.set_zero_level(unit_of("set_zero_level", module), int(level), bool(last_micro_batch))


class UnshardScope:
    """Parameters of a whole tree gathered for a while, for example to sample from a model: ``with UnshardScope(model): ...``

    Forwards in it free nothing; a backward does. Entering is collective. No unit of the tree may be wrapped in it. Raises
    ValueError: no sharded module; CommError: then nothing stays gathered that was not before.
    """

    def __init__(self, module: nn.Module) -> None:
        self._unit = unit_of("UnshardScope", module)
        self._scope: Any = None

    def __enter__(self) -> UnshardScope:
        self._scope = _C.UnshardScope(self._unit)
        return self

    def __exit__(self, *_: Any) -> None:
        self._scope = None


def reset_parameters(module: nn.Module, seed: int, init: Callable[[str, torch.Tensor, torch.Generator], None]) -> None:
    """Gives values to every parameter of the units in ``module``: they depend on seed and names, not on world, mesh, layout or units.

    Memory: one parameter besides the shards. Local; the ranks of a mesh must pass the same seed. After a start on the meta device call
    ``module.to_empty(device="cpu")`` before.

    Args:
        init: ``init(name, whole, generator)`` fills ``whole``, an uninitialised tensor of the parameter's whole shape and dtype, in
            place. ``name`` is that below ``module``; ``generator`` is seeded from seed and name.
    Raises ValueError: no sharded module, in the middle of a step, a parameter that ``init`` leaves unwritten.
    """
    _C.reset_parameters(unit_of("reset_parameters", module), seed, init)


def load_full(module: nn.Module, values: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Copies this rank's parts out of whole parameters that every rank has, casting. For all layouts; buffers are not touched. Local.

    Args:
        values: plain tensors of the whole shape, of any floating dtype, by parameter name below ``module``.
        strict: names must be those of the parameters of units in ``module``; otherwise names that only one side has are passed over.
    Raises ValueError, and changes nothing then: in the middle of a step, a name that is missing or unknown, a wrong shape.
    """
    _C.load_full(unit_of("load_full", module), list(values.items()), strict)


def load_from_rank0(module: nn.Module, values: Mapping[str, torch.Tensor] | None, strict: bool = True) -> None:
    """Like load_full with values that only the first rank of the mesh has; the others pass None. Each parameter is cut and sent on its
    own. Collective over the mesh. Raises ValueError on all ranks alike, before anything is changed; CommError."""
    _C.load_from_rank0(unit_of("load_from_rank0", module), list((values or {}).items()), strict)
