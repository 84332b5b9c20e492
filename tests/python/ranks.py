"""Runs a function on ranks that are processes of their own, with a time limit."""
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback

SECONDS = 120

_context = multiprocessing.get_context("forkserver")
# Forked from a process that has these: torch takes seconds to import.
_preloaded = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "hyper_parallel", "models", "scripts", "spmd_scripts"]
_context.set_forkserver_preload(_preloaded)


def preload(*modules):
    """Modules that all ranks will need. Before the first run."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def _join(rank, world, folder, backend):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    elif backend is not None:
        dist.init_process_group(backend, rank=rank, world_size=world, store=dist.FileStore(os.path.join(folder, "store"), world))


def _rank_main(connection, rank, world, folder, backend):
    """Runs one function after the other, until the other end is closed."""
    import torch

    try:
        _join(rank, world, folder, backend)
        while True:
            function, arguments = connection.recv()
            torch.manual_seed(0)
            try:
                connection.send((True, function(rank, world, *arguments)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
    except EOFError:
        pass
    except BaseException:
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    # FSDP2 over Gloo sometimes aborts in its destructors. test_exit lets the interpreter end by itself.
    os._exit(0)


class Ranks:
    """Processes that wait for functions to run."""

    def __init__(self, count, world, backend):
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.ends = [], []
        for rank in range(count):
            here, there = _context.Pipe()
            process = _context.Process(target=_rank_main, args=(there, rank, world, self.folder.name, backend), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.ends.append(here)

    def run(self, function, arguments, seconds):
        """Results and failures."""
        results, failures = [None] * len(self.ends), []
        for end in self.ends:
            end.send((function, arguments))
        deadline = time.monotonic() + seconds
        for rank, end in enumerate(self.ends):
            # The others wait for a rank that has failed: they get a moment only.
            if failures:
                deadline = min(deadline, time.monotonic() + 1)
            try:
                if not end.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} has not come back")
                    continue
                fine, results[rank] = end.recv()
                if not fine:
                    failures.append(f"rank {rank}:\n{results[rank]}")
            except (EOFError, ConnectionError):
                failures.append(f"rank {rank} died")
        return results, failures

    def close(self, kill):
        for process, end in zip(self.processes, self.ends):
            if kill:
                process.kill()
            end.close()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


_kept = {}  # by world: starting ranks takes longer than most tests


def run_ranks(world, function, *arguments, seconds=SECONDS, backend="gloo", size=None, alone=False):
    """[function(rank, world, *arguments)] of all ranks; `function` must be importable. Fails with the first traceback.

    :param size: world size to tell them, where it is more than the number of processes (backend "fake")
    :param alone: in processes of its own, that serve no other test
    """
    shared = backend == "gloo" and not alone
    ranks = _kept.pop(world, None) if shared else None
    ranks = ranks or Ranks(world, size or world, backend)
    failures = ["interrupted"]
    try:
        results, failures = ranks.run(function, arguments, seconds)
    finally:
        if shared and not failures:
            _kept[world] = ranks
        else:
            ranks.close(kill=bool(failures))
    assert not failures, "\n".join(failures)
    return results


def stop_kept_ranks():
    while _kept:
        _kept.popitem()[1].close(kill=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
