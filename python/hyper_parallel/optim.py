"""Optimizers over flat shards, and clipping. They take a sharded module; torch's optimizers work on its parameters as well."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import _C
from .fsdp._module import FSDPModule, _states, check_bool, number


def _unit(op: str, module: nn.Module) -> _C.Unit:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"[{op}] module is {type(module).__name__}, want one that fully_shard was called on")
    return module._hyper_parallel_state.unit


class AdamW:
    """AdamW over the flat shards of a module and of all units below it: a few large kernels instead of one for each parameter.

    The numbers are those of ``torch.optim.AdamW`` to rounding; the result does not depend on the number of ranks. State is fp32, or
    fp64 for fp64 parameters. Local, like every optimizer step. Parameters that fully_shard does not manage are not updated.

    Args:
        module: the outermost module that ``fully_shard`` was called on; all units must have been made.
        lr, betas, eps, weight_decay, maximize: as in torch.
        master_weights: keep an fp32 copy of bf16 and fp16 parameters and update that.
    Raises ValueError: no sharded module, lr, eps or weight_decay negative, betas outside of [0, 1).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        unit = _unit("AdamW", module)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"[AdamW] betas is {betas!r}, want two numbers")
        check_bool("AdamW", "maximize", maximize)
        check_bool("AdamW", "master_weights", master_weights)
        both = number("AdamW", "betas[0]", betas[0]), number("AdamW", "betas[1]", betas[1])
        numbers = number("AdamW", "lr", lr), both, number("AdamW", "eps", eps), number("AdamW", "weight_decay", weight_decay)
        self._optimizer = _C.AdamW(unit, *numbers, maximize, master_weights)

    def step(self) -> None:
        """Updates every parameter that has a gradient. Local."""
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters of the tree."""
        check_bool("zero_grad", "set_to_none", set_to_none)
        self._optimizer.zero_grad(set_to_none)

    @property
    def lr(self) -> float:
        """Learning rate. Raises ValueError when set to a negative number or NaN."""
        return self._optimizer.lr()

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.set_lr(number("AdamW", "lr", value))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By parameter name: ``step`` and this rank's parts of ``exp_avg`` and ``exp_avg_sq``, which share memory with the optimizer."""
        return {name: {"step": step, **tensors} for name, step, tensors in self._optimizer.state()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Takes over what state_dict gave for the same parameters cut the same way. Raises ValueError, and changes nothing then."""
        if not isinstance(state, dict) or not all(isinstance(values, dict) and "step" in values for values in state.values()):
            raise ValueError("[AdamW] state is not what state_dict gives, want a dictionary with step and tensors for each name")
        entries = [
            (name, int(values["step"]), {key: value for key, value in values.items() if key != "step"})
            for name, values in state.items()
        ]
        self._optimizer.load_state(entries)


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales all gradients below a sharded module so that their norm over all ranks is at most ``max_norm``.

    Returns the norm before, a plain scalar that is equal on all ranks. Collective over the mesh of the module. Raises ValueError:
    no sharded module, ``max_norm`` negative, ``norm_type`` not positive; RuntimeError: ``error_if_nonfinite`` and the norm is not
    finite. ``torch.nn.utils.clip_grad_norm_`` works as well.
    """
    unit = _unit("clip_grad_norm_", module)
    max_norm, norm_type = number("clip_grad_norm_", "max_norm", max_norm), number("clip_grad_norm_", "norm_type", norm_type)
    check_bool("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    meshes = {slot.mesh for state in _states(module, True) for slot in state.slots if slot.mesh is not state.mesh}
    if meshes:
        raise ValueError("[clip_grad_norm_] there are parameters that tensor parallelism has cut, want torch.nn.utils.clip_grad_norm_")
    norm = _C.clip_grad_norm_(unit, max_norm, norm_type, error_if_nonfinite)
    return torch.tensor(norm)
