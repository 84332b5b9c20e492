"""State dictionaries. Parameters, gradients and optimizer state are torch's DTensors, so torch's functions are ours.

``full_state_dict``, ``cpu_offload``, ``broadcast_from_rank0``, ``strict`` and ``ignore_frozen_params`` of ``StateDictOptions`` work as
documented by torch. Parameters keep their identity when a dictionary is loaded, so that optimizers built before go on.
"""
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
