"""The tracks of a trace: a process for each rank, and in it a thread for each kind of work.

Used by workers, the driver and the command line. `Lanes` is the state of one rank's tracks, which
the driver's `Trace` owns.
"""

from __future__ import annotations

TRAINING, COMMUNICATION, CHECKPOINT_WRITER, HOROVOD = 1, 2, 3, 4

TRACK_NAMES = {
    TRAINING: "training",
    COMMUNICATION: "communication",
    CHECKPOINT_WRITER: "checkpoint writer",
    HOROVOD: "Horovod",
}
DRIVER_PID = 1_000_000  # a rank's process id is its rank; viewers take no negative ones
DRIVER_TID = 1
LANES_APART = 10  # from a lane's thread id to that of the next lane of the same track


class Lanes:
    """Spreads spans that overlap, such as collectives under way at once, over several threads.

    A viewer draws a thread's spans as a stack, so those of one thread must not overlap.
    """

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}  # of each lane's last span, by track

    def place(self, track: int, begin: float, end: float) -> int:
        """The thread id of a span. Spans of a track are placed in the order of their ends."""
        if track == TRAINING:
            return track  # one thread: its spans nest by themselves
        ends = self._ends.setdefault(track, [])
        for lane, last in enumerate(ends):
            if last <= begin:
                ends[lane] = end
                return track + lane * LANES_APART
        ends.append(end)
        return track + (len(ends) - 1) * LANES_APART


def track_of(tid: int) -> int:
    return tid % LANES_APART


def thread_name(tid: int) -> str:
    lane = tid // LANES_APART
    name = TRACK_NAMES.get(track_of(tid), f"track {track_of(tid)}")
    return f"{name} ({lane + 1})" if lane else name
