"""Optimizers over flat shards, clipping, averages. They take a sharded module; torch's optimizers work on its parameters as well.

Optimizers, averages and clipping know main gradients, the ragged layout and source layouts. ``groups`` are dictionaries with the keys
``names`` (list of parameter names) or ``predicate`` (function of name and whole shape), and ``lr``, ``weight_decay``, for AdamW also
``betas`` and ``eps``; a parameter belongs to the first group that lists it or whose predicate takes it. ``decays`` and ``parameters`` are
functions of name and whole shape as well: which parameters get weight decay, and which are updated at all. ``state_dtype`` is float32,
float64 or bfloat16; by default float32, but float64 for float64 parameters.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import _C
from ._tools import unit_of
from .fsdp._module import _states, check_bool, number

Predicate = Callable[[str, list[int]], bool]
Groups = Sequence[Mapping[str, Any]]

_GROUP_KEYS: dict[str, Any] = {"names": [], "predicate": None, "lr": None, "weight_decay": None, "betas": None, "eps": None}


def _groups(op: str, groups: Groups) -> list[dict[str, Any]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"[{op}] groups is {groups!r}, want a list of dictionaries")
    for group in groups:
        unknown = sorted(set(group) - set(_GROUP_KEYS))
        if unknown:
            raise ValueError(f"[{op}] a group has the keys {unknown}, want some of {sorted(_GROUP_KEYS)}")
    return [{**_GROUP_KEYS, **_checked(op, dict(group))} for group in groups]


class FlatOptimizer:
    """What AdamW, SGD and Muon have in common."""

    _optimizer: Any

    def step(self) -> None:
        """Updates every parameter that has a gradient. Local; Muon's is collective over the shard groups and raises CommError."""
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and main gradients of all parameters of the tree. Local. Raises ValueError: no bool."""
        check_bool("zero_grad", "set_to_none", set_to_none)
        self._optimizer.zero_grad(set_to_none)

    @property
    def lr(self) -> float:
        """Learning rate of all parameters without a group of their own. Setting it gives all groups one rate; raises ValueError when it
        is negative or NaN."""
        return self._optimizer.lr()

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.set_lr(number(type(self).__name__, "lr", value))

    @property
    def lrs(self) -> list[float]:
        """Rates of all groups in their order, then that of all other parameters; with Muon those of its matrices first.

        Setting them raises ValueError: another number of rates, one that is negative or NaN.
        """
        return self._optimizer.lrs()

    @lrs.setter
    def lrs(self, values: Sequence[float]) -> None:
        self._optimizer.set_lrs([number(type(self).__name__, "lrs", value) for value in values])

    def state_bytes(self) -> int:
        """Of the state, once every parameter has had a gradient. Local."""
        return self._optimizer.state_bytes()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By parameter name: ``step`` and this rank's parts of the state, of the shard's shape and in ``state_dtype``.

        They share memory with the optimizer. Local.
        """
        return {name: {"step": step, **tensors} for name, step, tensors in self._optimizer.state()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Takes over what state_dict gave for the same parameters cut the same way. Raises ValueError, and changes nothing then."""
        if not isinstance(state, dict) or not all(isinstance(values, dict) and "step" in values for values in state.values()):
            raise ValueError(f"[{type(self).__name__}] state is not what state_dict gives, want a dictionary with step and tensors for "
                             "each name")
        entries = [
            (name, int(values["step"]), {key: value for key, value in values.items() if key != "step"})
            for name, values in state.items()
        ]
        self._optimizer.load_state(entries)


def _adamw_options(op: str, given: dict[str, Any]) -> dict[str, Any]:
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decays": None, "groups": (), "maximize": False,
               "state_dtype": None, "master_weights": False, "parameters": None}
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise ValueError(f"[{op}] adamw has the keys {unknown}, want some of {sorted(options)}")
    options.update(given)
    options["groups"] = _groups(op, options["groups"])  # type: ignore[arg-type]
    return _checked(op, options)


def _checked(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """The engine would raise TypeError for these."""
    for name in ("maximize", "master_weights", "nesterov"):
        check_bool(op, name, options.get(name, False))
    for name in ("lr", "eps", "weight_decay", "momentum", "dampening"):
        if name in options:
            options[name] = number(op, name, options[name])
    for name in ("state_dtype", "ns_dtype"):
        missing = name == "state_dtype" and options.get(name) is None
        if name in options and not missing and not isinstance(options[name], torch.dtype):
            raise ValueError(f"[{op}] {name} is {options[name]!r}, want a torch.dtype")
    for name in ("names", "not_matrices"):
        if name in options and not all(isinstance(each, str) for each in options[name]):
            raise ValueError(f"[{op}] {name} is {options[name]!r}, want names of parameters")
    steps = options.get("ns_steps", 0)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"[{op}] ns_steps is {steps!r}, want a whole number")
    for name, count in (("betas", 2), ("ns_coefficients", 3)):
        if name in options:
            given = options[name]
            if not isinstance(given, (tuple, list)) or len(given) != count:
                raise ValueError(f"[{op}] {name} is {given!r}, want {count} numbers")
            options[name] = tuple(number(op, f"{name}[{i}]", value) for i, value in enumerate(given))
    for name in ("decays", "parameters", "matrices", "predicate"):
        if options.get(name) is not None and not callable(options[name]):
            raise ValueError(f"[{op}] {name} is {type(options[name]).__name__}, want a function of name and shape, or None")
    return options


class AdamW(FlatOptimizer):
    """AdamW over the flat shards of a module and of all units below it: a few large kernels instead of one for each parameter.

    The numbers are those of ``torch.optim.AdamW`` to rounding; the result does not depend on the number of ranks. Local, like every
    optimizer step. Parameters that fully_shard does not manage are not updated.

    Args:
        module: the outermost module that ``fully_shard`` was called on; all units must have been made.
        lr, betas, eps, weight_decay, maximize: as in torch.
        master_weights: keep an fp32 copy of bf16 and fp16 parameters and update that.
        groups, decays, parameters, state_dtype: see the module.
    Raises ValueError: no sharded module; lr, eps or weight_decay negative; betas outside of [0, 1); a group without names and predicate,
    a name in two groups or of no parameter; another state_dtype.
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
        groups: Groups = (),
        decays: Predicate | None = None,
        parameters: Predicate | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        options = _adamw_options("AdamW", {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize, "master_weights": master_weights,
            "groups": groups, "decays": decays, "parameters": parameters, "state_dtype": state_dtype,
        })
        self._optimizer = _C.AdamW(unit_of("AdamW", module), options)


class SGD(FlatOptimizer):
    """Gradient descent with momentum over flat shards: the numbers of ``torch.optim.SGD`` to rounding. Local.

    Args:
        module: see AdamW.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        master_weights, groups, decays, parameters, state_dtype: as for AdamW.
    Raises ValueError: no sharded module; lr, momentum or weight_decay negative; nesterov without momentum or with dampening; and what
    AdamW raises of groups and state_dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        master_weights: bool = False,
        groups: Groups = (),
        decays: Predicate | None = None,
        parameters: Predicate | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self._optimizer = _C.SGD(unit_of("SGD", module), _checked("SGD", {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "master_weights": master_weights, "groups": _groups("SGD", groups), "decays": decays,
            "parameters": parameters, "state_dtype": state_dtype,
        }))


class Muon(FlatOptimizer):
    """Muon in the form of ``torch.optim.Muon`` for the matrices of hidden layers, sharded in any layout; AdamW for everything else.

    Each matrix is orthogonalized on one of the ranks that share it; ``step`` is collective over the shard groups.

    Args:
        module: see AdamW.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in torch.
        adjust_lr_fn: "original" or "match_rms_adamw", as in torch.
        matrices: function of name and whole shape: which parameters Muon updates. Default: all of two dimensions but ``not_matrices``.
        not_matrices: names of matrices for AdamW, e.g. embeddings and output heads.
        groups: of matrices: lr and weight_decay.
        ns_dtype: of Newton-Schulz and of what travels: float32 or bfloat16.
        state_dtype, master_weights: of the matrices, as for AdamW.
        adamw: arguments of AdamW, for all other parameters.
    Raises ValueError: what AdamW raises; momentum outside [0, 1), ns_steps outside [0, 100), eps negative, another ns_dtype or
    adjust_lr_fn, a parameter chosen that is no matrix, a name in not_matrices of no parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        matrices: Predicate | None = None,
        not_matrices: Iterable[str] = (),
        groups: Groups = (),
        ns_dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(f"[Muon] adjust_lr_fn is {adjust_lr_fn!r}, want \"original\" or \"match_rms_adamw\"")
        self._optimizer = _C.Muon(unit_of("Muon", module), _checked("Muon", {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "match_rms_adamw": adjust_lr_fn == "match_rms_adamw", "matrices": matrices, "not_matrices": list(not_matrices),
            "groups": _groups("Muon", groups), "ns_dtype": ns_dtype, "state_dtype": state_dtype, "master_weights": master_weights,
            "adamw": _adamw_options("Muon", dict(adamw or {})),
        }))


class Ema:
    """Averages of the parameters, kept on the shards: average = decay * average + (1 - decay) * parameter, without any gather. Local.

    Starts from the parameters as they are. Memory: one flat tensor of each shard's size, a second one while swapped.

    Args:
        module: see AdamW.
        decay: in [0, 1].
        ramp: decay min(decay, (1 + step) / (10 + step)) in early steps.
        dtype: of the averages. Default: float32, but float64 for float64 parameters.
    Raises ValueError: no sharded module, decay outside [0, 1], a dtype that is not floating-point.
    """

    def __init__(self, module: nn.Module, *, decay: float = 0.999, ramp: bool = False, dtype: torch.dtype | None = None) -> None:
        unit = unit_of("Ema", module)
        check_bool("Ema", "ramp", ramp)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"[Ema] dtype is {dtype!r}, want a torch.dtype or None")
        self._ema = _C.Ema(unit, number("Ema", "decay", decay), ramp, dtype)

    def update(self, step: int) -> None:
        """Takes the parameters into the averages, after optimizer step ``step``. Raises RuntimeError: while swapped; ValueError: below 0."""
        self._ema.update(step)

    def reset(self) -> None:
        """The averages become the parameters as they are now. Raises RuntimeError: while swapped."""
        self._ema.reset()

    def swap(self) -> None:
        """Puts the averages into the model, for evaluation, and keeps the trained parameters. Raises RuntimeError: swapped already."""
        self._ema.swap()

    def restore(self) -> None:
        """Puts the trained parameters back, bit for bit. Raises RuntimeError: not swapped."""
        self._ema.restore()

    @property
    def swapped(self) -> bool:
        """Whether the averages are in the model."""
        return self._ema.swapped()

    def copy_to(self) -> None:
        """Puts the averages into the model for good. Raises RuntimeError: while swapped."""
        self._ema.copy_to()

    def decay_at(self, step: int) -> float:
        """What ``update(step)`` multiplies the averages by."""
        return self._ema.decay_at(step)

    def averages(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the averages, by parameter name. They share memory: writing to one restores an average."""
        return self._ema.averages()


class GradScaler:
    """Scales the loss so that small fp16 gradients do not vanish, as ``torch.amp.GradScaler`` does, for the optimizers here and with one
    decision for all ranks.

    A step: ``scaler.scale(loss).backward(); scaler.unscale_(model); clip_grad_norm_(model, 1.0); scaler.step(optimizer);
    scaler.update()``, where unscale_ may be left out. When a gradient of any rank is infinite or NaN, no rank steps.

    Raises ValueError: init_scale not positive and finite as fp32, growth_factor not above 1, backoff_factor outside (0, 1),
    growth_interval below 1.
    """

    def __init__(
        self,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        op = "GradScaler"
        scale, growth = number(op, "init_scale", init_scale), number(op, "growth_factor", growth_factor)
        backoff = number(op, "backoff_factor", backoff_factor)
        if isinstance(growth_interval, bool) or not isinstance(growth_interval, int):
            raise ValueError(f"[{op}] growth_interval is {growth_interval!r}, want a whole number")
        check_bool(op, "enabled", enabled)
        self._scaler = _C.GradScaler(scale, growth, backoff, growth_interval, enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """loss * get_scale(), in fp32 where the loss is fp16 or bf16. Local."""
        return self._scaler.scale(loss)

    def unscale_(self, module: nn.Module, plain_parameters: Iterable[torch.Tensor] = ()) -> None:
        """Divides the gradients of the tree, and of ``plain_parameters`` outside of it, by the scale, and finds out whether all of them, of
        all ranks, are finite. Collective. Raises ValueError: fp16 gradients; RuntimeError: a second time before update()."""
        self._scaler.unscale_(unit_of("GradScaler", module), list(plain_parameters))

    def step(self, optimizer: FlatOptimizer) -> bool:
        """Steps unless gradients were not finite; returns whether it did. Unscales before if that was not done, collective then."""
        if not isinstance(optimizer, FlatOptimizer):
            raise ValueError(f"[GradScaler] optimizer is {type(optimizer).__name__}, want one of hyper_parallel.optim; torch.amp.GradScaler "
                             "is for torch's")
        return self._scaler.step(optimizer._optimizer)

    def update(self) -> None:
        """Ends the step: the scale shrinks or grows. Local. Raises RuntimeError: nothing was unscaled since the last one."""
        self._scaler.update()

    def get_scale(self) -> float:
        """The factor of the next loss; 1.0 where it is not enabled."""
        return self._scaler.get_scale()

    @property
    def found_nonfinite(self) -> bool:
        """Whether any rank had a gradient that is infinite or NaN since the last update."""
        return self._scaler.found_nonfinite()

    def state_dict(self) -> dict[str, float]:
        """``scale``, and in ``growth_tracker`` the steps since it last changed. Equal on all ranks."""
        scale, growth_tracker = self._scaler.state()
        return {"scale": scale, "growth_tracker": growth_tracker}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what state_dict gave. Raises ValueError: scale not positive and finite as fp32, growth_tracker negative;
        KeyError: one of them is missing."""
        self._scaler.load_state(float(state["scale"]), int(state["growth_tracker"]))


def _clipped(op: str, module: nn.Module) -> Any:
    unit = unit_of(op, module)
    if any(slot.cut for state in _states(module, True) for slot in state.slots):
        raise ValueError(f"[{op}] there are DTensors that tensor parallelism has cut, want torch.nn.utils.clip_grad_norm_")
    return unit


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    plain_parameters: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all gradients below a sharded module so that their norm over all ranks is at most ``max_norm``.

    Knows units on different meshes, source layouts, main gradients and the ragged layout. Returns the norm before, a plain scalar
    of torch's default dtype, equal on all ranks. Collective over the meshes of the units. Raises ValueError: no sharded module,
    ``max_norm`` negative, ``norm_type`` not positive, parameters that are DTensors that parallelize_module has cut
    (torch.nn.utils.clip_grad_norm_ works for those); RuntimeError: ``error_if_nonfinite`` and the norm is not finite.

    Args:
        plain_parameters: parameters outside of the units (``ignored_params``), equal on all ranks: counted once and scaled alike.
    """
    unit = _clipped("clip_grad_norm_", module)
    max_norm, norm_type = number("clip_grad_norm_", "max_norm", max_norm), number("clip_grad_norm_", "norm_type", norm_type)
    check_bool("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    return torch.tensor(_C.clip_grad_norm_(unit, max_norm, norm_type, error_if_nonfinite, list(plain_parameters)))


def get_total_norm(
    module: nn.Module, norm_type: float = 2.0, error_if_nonfinite: bool = False, *, plain_parameters: Iterable[torch.Tensor] = ()
) -> torch.Tensor:
    """The norm that clip_grad_norm_ returns. Collective. Raises as that does."""
    unit = _clipped("get_total_norm", module)
    norm_type = number("get_total_norm", "norm_type", norm_type)
    check_bool("get_total_norm", "error_if_nonfinite", error_if_nonfinite)
    return torch.tensor(_C.get_total_norm(unit, norm_type, error_if_nonfinite, list(plain_parameters)))


def clip_grads_with_norm_(
    module: nn.Module, max_norm: float, total_norm: float | torch.Tensor, *, plain_parameters: Iterable[torch.Tensor] = ()
) -> None:
    """The scaling of clip_grad_norm_ for a norm that is known. Local. Raises ValueError: no sharded module, max_norm negative or NaN."""
    op = "clip_grads_with_norm_"
    norms = number(op, "max_norm", max_norm), number(op, "total_norm", total_norm)
    _C.clip_grads_with_norm_(unit_of(op, module), *norms, list(plain_parameters))


def clip_grad_value_(module: nn.Module, clip_value: float, *, plain_parameters: Iterable[torch.Tensor] = ()) -> None:
    """Limits every element of every gradient to [-clip_value, clip_value]. Local. Raises ValueError: no sharded module, negative or NaN."""
    value = number("clip_grad_value_", "clip_value", clip_value)
    _C.clip_grad_value_(unit_of("clip_grad_value_", module), value, list(plain_parameters))


__all__ = [
    "AdamW",
    "Ema",
    "FlatOptimizer",
    "GradScaler",
    "Muon",
    "SGD",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
