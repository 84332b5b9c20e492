#!/usr/bin/env python3
"""The other side of safetensors_python_test: the Python package reads what we wrote, and writes what we read.

safetensors_peer.py installed          exit status 0 if the package is there
safetensors_peer.py write FILE         a file with every dtype that torch and the package know
safetensors_peer.py rewrite FILE TO    loads FILE, checks its values, saves them again
safetensors_peer.py judge FILE         FILE: number of inputs, then length and bytes of each (8 bytes little-endian); prints 1 or 0 for each
"""
import importlib.util
import struct
import sys


def dtypes():
    import torch

    names = ("bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz int16 uint16 float16 bfloat16 int32 uint32 "
             "float32 complex64 float64 int64 uint64")
    return [getattr(torch, name) for name in names.split()]


def values(dtype, count):
    import torch

    size = torch.empty(0, dtype=dtype).element_size()
    data = bytearray((7 * i + size) % (2 if dtype == torch.bool else 120) for i in range(count * size))
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype)


def write(path):
    from safetensors.torch import save_file
    import torch

    tensors = {f"{i}.{dtype}": values(dtype, 6).view(2, 3) for i, dtype in enumerate(dtypes())}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(3, 0, 2, dtype=torch.float16)
    tensors['quo"te\\ \t\u00e9\U0001f600'] = torch.arange(5)
    save_file(tensors, path, metadata={"format": "pt"})


def rewrite(path, to):
    from safetensors.torch import load_file, save_file
    import torch

    tensors = load_file(path)
    assert tensors["count"].dtype == torch.float32 and tensors["count"].tolist() == [[0, 1, 2], [3, 4, 5]], tensors["count"]
    assert tensors["flags"].dtype == torch.bool and tensors["flags"].tolist() == [True, False, True], tensors["flags"]
    assert tensors["half"].dtype == torch.bfloat16 and tensors["half"].item() == 1.5, tensors["half"]
    assert tensors["none"].shape == (0, 4), tensors["none"]
    assert len(tensors) == 4, list(tensors)
    save_file(tensors, to, metadata={"format": "pt"})


def judge(path):
    from safetensors import SafetensorError, deserialize

    with open(path, "rb") as source:
        data = source.read()
    count, at, verdicts = struct.unpack_from("<Q", data, 0)[0], 8, []
    for _ in range(count):
        size = struct.unpack_from("<Q", data, at)[0]
        at += 8
        try:
            deserialize(data[at:at + size])
            verdicts.append("1")
        except SafetensorError:
            verdicts.append("0")
        at += size
    print("".join(verdicts))


def main():
    mode, *paths = sys.argv[1:]
    if mode == "installed":
        return 0 if importlib.util.find_spec("safetensors") else 1
    {"write": write, "rewrite": rewrite, "judge": judge}[mode](*paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
