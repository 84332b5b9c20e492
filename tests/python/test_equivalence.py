"""FSDP2 and we give the same losses, gradients and weights, step by step, with only the import changed."""
import pytest
import torch
import torch.distributed.fsdp as theirs

import hyper_parallel.fsdp as ours
import scripts
from compare import BF16, check_steps, compare
from ranks import run_ranks

WORLDS = pytest.mark.parametrize("world", [1, 2, 4])


@WORLDS
def test_dense(world):
    compare(world, scripts.dense)


@pytest.mark.parametrize("reshard", [True, False])
def test_dense_with_reshard(reshard):
    compare(2, scripts.dense, reshard=reshard)


def test_dense_with_reshard_over_two_of_four():
    compare(4, scripts.dense, reshard=2)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizers(options):
    compare(2, scripts.all_optimizers, clip=0.5, steps=2, **options)


def test_sgd_clipped():
    compare(4, scripts.dense, clip=0.3, optimizer_type=torch.optim.SGD, momentum=0.9, nesterov=True)


def test_tied_weights():
    compare(2, scripts.dense, tied=True)


# Axes of size 1 are meshes like any other.
@pytest.mark.parametrize("world,hybrid", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)])
def test_hsdp_of_one(world, hybrid):
    compare(world, scripts.dense, hybrid=hybrid, steps=2)


@pytest.mark.parametrize("reshard", [None, False])
def test_hsdp(reshard):
    compare(4, scripts.dense, hybrid=2, reshard=reshard)


@WORLDS
def test_mixed_precision(world):
    compare(world, scripts.dense, optimizer_type=torch.optim.SGD, **BF16)


def test_mixed_precision_hsdp():
    compare(4, scripts.dense, hybrid=2, optimizer_type=torch.optim.SGD, **BF16)


@WORLDS
def test_accumulation(world):
    compare(world, scripts.accumulation)


def test_accumulation_in_bf16():
    compare(2, scripts.accumulation, **BF16)
    compare(4, scripts.accumulation, hybrid=2, by="all_reduce", **BF16)


@pytest.mark.parametrize("by", ["sync", "all_reduce", "last"])
def test_accumulation_hsdp(by):
    compare(4, scripts.accumulation, hybrid=2, by=by)


def test_accumulation_with_a_later_last_backward():
    compare(2, scripts.accumulation, by="last")


@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, where):
    compare(2, scripts.checkpointing, reentrant=reentrant, where=where)


@WORLDS
def test_checkpoint_worlds(world):
    compare(world, scripts.checkpointing)


@WORLDS
def test_frozen_parts(world):
    compare(world, scripts.frozen)


@WORLDS
def test_several_forwards(world):
    compare(world, scripts.several_forwards)


@WORLDS
def test_partial_use(world):
    compare(world, scripts.partial_use)


@WORLDS
def test_exceptions(world):
    compare(world, scripts.exceptions)


def failed_backward(rank, world):
    # FSDP2 keeps what the root got before the failure, and adds it to the next gradient. Both are right after a failed forward.
    got, want = scripts.exceptions(ours, rank, world, where="backward"), scripts.exceptions(theirs, rank, world)
    check_steps(got, want, 1e-5, 1e-5)


@WORLDS
def test_exceptions_in_backward(world):
    run_ranks(world, failed_backward)


@WORLDS
def test_a_list_of_modules(world):
    compare(world, scripts.one_list)


@pytest.mark.parametrize("options", [{}, BF16, {"hybrid": True}], ids=["fp32", "bf16", "hsdp"])
def test_tensor_parallel(options):
    compare(4, scripts.tensor_parallel, **options)


@pytest.mark.parametrize("world", [1, 2])
def test_tensor_parallel_without_shards(world):
    compare(world, scripts.tensor_parallel)


def test_loader_schedule_and_scaler():
    compare(2, scripts.loader_schedule_and_scaler)
