"""Traces: what each rank did when, as Chrome trace JSON for https://ui.perfetto.dev. HP_TRACE=path in the environment does the same."""
from __future__ import annotations

from . import _C


def start(path: str, *, events_per_thread: int = 1 << 16) -> None:
    """Starts recording for all threads of this process. Calls nest: one with the same path joins the recording. Local.

    Args:
        path: the file, in which %r stands for the rank. Missing folders are made.
        events_per_thread: space of each thread; events beyond it are dropped and counted in the file.
    Raises ValueError: another path is recorded already, no %r where there are several ranks, no space for events; RuntimeError: the
    folder cannot be made.
    """
    _C.trace_start(path, events_per_thread)


def stop() -> list[str]:
    """Ends what start began. The last stop writes the file and returns its name. Local. Raises RuntimeError: it cannot be written."""
    return _C.trace_stop()


__all__ = ["start", "stop"]
