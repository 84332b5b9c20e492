#!/usr/bin/env python3
"""Prints the numbers of tests/dist/optim_muon_test.cpp.

They are those of torch.optim.Muon on two small matrices, with Newton-Schulz in fp32 instead of bf16.
"""
import torch

torch.Tensor.bfloat16 = lambda tensor: tensor.clone()  # the fp32 in the docstring


def wave(rows, columns, step):
    return torch.sin(torch.arange(rows * columns, dtype=torch.float64).square() * 0.37 + step).float().view(rows, columns)


for rows, columns, options in [(4, 3, {"nesterov": True}), (3, 5, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"})]:
    weight = torch.nn.Parameter(wave(rows, columns, 100))
    optimizer = torch.optim.Muon([weight], lr=0.05, weight_decay=0.1, momentum=0.9, **options)
    for step in range(3):
        weight.grad = wave(rows, columns, step)
        optimizer.step()
    print(f"{rows}x{columns}: " + ", ".join(f"{value:.7f}" for value in weight.detach().flatten().tolist()))
