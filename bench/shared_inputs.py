"""What both sides of the comparison start from: initial weights and tokens, in files that any language reads with a few lines.

inputs.json   the shape of the model, "steps" and "world", and "weights": a list of {"name", "shape"}
weights.bin   the weights in this order, each row-major float32, little-endian, nothing in between
tokens.bin    int32, little-endian, row-major [steps][world][batch_size][seq_len + 1]; a rank's inputs of step s are [s % steps][rank][:][:-1],
              its targets [s % steps][rank][:][1:]
"""
import ctypes
import dataclasses
import json
import pathlib

import torch

from llama_twin import Llama, Shape


def raw(tensor):
    """The bytes of a contiguous tensor, to read from and write into."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr())


def write(folder, shape, world, steps=8, seed=0):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = Llama(shape)
    model.reset_parameters(seed)
    weights = []
    with open(folder / "weights.bin", "wb") as file:
        for name, parameter in model.named_parameters():
            weights.append({"name": name, "shape": list(parameter.shape)})
            file.write(raw(parameter.detach().contiguous()))
    generator = torch.Generator().manual_seed(seed + 1)
    # Small tokens are more likely, so that the loss falls from the first steps on.
    uniform = torch.rand(steps, world, shape.batch_size, shape.seq_len + 1, generator=generator)
    tokens = (uniform.pow(3) * shape.vocab_size).to(torch.int32).contiguous()
    (folder / "tokens.bin").write_bytes(bytes(raw(tokens)))
    header = {**dataclasses.asdict(shape), "steps": steps, "world": world, "weights": weights}
    (folder / "inputs.json").write_text(json.dumps(header, indent=1))


class Inputs:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        header = json.loads((self.folder / "inputs.json").read_text())
        self.weights = header.pop("weights")
        self.steps, self.world = header.pop("steps"), header.pop("world")
        self.shape = Shape(**header)
        self.tokens = torch.empty(self.steps, self.world, self.shape.batch_size, self.shape.seq_len + 1, dtype=torch.int32)
        self.fill(open(self.folder / "tokens.bin", "rb"), self.tokens)

    @staticmethod
    def fill(file, tensor):
        if file.readinto(raw(tensor)) != tensor.numel() * tensor.element_size():
            raise ValueError(f"{file.name} is too short")

    @torch.no_grad()
    def load_weights(self, model):
        parameters = dict(model.named_parameters())
        with open(self.folder / "weights.bin", "rb") as file:
            for entry in self.weights:
                parameter = parameters.pop(entry["name"])
                if list(parameter.shape) != entry["shape"] or not parameter.is_contiguous():
                    raise ValueError(f"{entry['name']}: shape {entry['shape']} in the file, {list(parameter.shape)} in the model")
                self.fill(file, parameter)
        if parameters:
            raise ValueError(f"no weights for {sorted(parameters)}")

    def batch(self, step, rank):
        rows = self.tokens[step % self.steps, rank].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
