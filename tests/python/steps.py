"""Steps of a model on its ranks, and of one process that sees the batches of all of them."""
import pytest
import torch

from models import batch, loss_of
from scripts import whole


def refused(error, *parts):
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


def step(model, rank, number):
    tokens, targets = batch(rank, number)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss.detach()


def reference_step(plain, world, number):
    """The same with the batches of all ranks."""
    for rank in range(world):
        tokens, targets = batch(rank, number)
        (loss_of(plain(tokens), targets) / world).backward()


def check_equal(model, plain, part=lambda parameter: parameter.detach(), **tolerance):
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(part(parameter)), part(other), msg=lambda text: f"{name}: {text}", **tolerance)  # noqa: B023
