"""The row ring of two members in one process: who waits is woken where an exchange came since the last row."""

from __future__ import annotations

import os
import threading
import time

from evenload.training.comm.row_ring import RowRing, ring_layout
from evenload.training.comm.shared_memory import ChannelLayout, SegmentMember, SharedSegment, start_ticks


def test_a_row_after_an_exchange_wakes_who_waits_for_it() -> None:
    members = [SegmentMember(rank, os.getpid(), start_ticks(os.getpid())) for rank in range(2)]
    layouts = [ChannelLayout(2, 32), ring_layout(2, 4)]
    fd = SharedSegment.create(members, layouts)
    segments = [SharedSegment(fd, members, rank, layouts) for rank in range(2)]
    os.close(fd)
    channels = [segment.channel(0, 5.0) for segment in segments]
    first, other = (RowRing(segment, 1, channel, 4, 5.0) for segment, channel in zip(segments, channels, strict=True))
    taken: list[tuple[float, list[float] | None]] = []
    others_part = threading.Event()

    def take() -> None:
        for _ in range(20):
            row = other.pop()
            taken.append((time.perf_counter(), None if row is None else row.tolist()))
            if row is None:
                channels[1].exchange_row([0.0] * 4)
                others_part.set()

    thread = threading.Thread(target=take)
    thread.start()
    late_s = []
    for number in range(10):
        time.sleep(0.03)  # it looks for a row 7 ms later by itself
        pushed_s = time.perf_counter()
        assert first.push([float(number)] * 4, wakes=False)
        while len(taken) < 2 * number + 1:
            time.sleep(0.0001)
        late_s.append(taken[-1][0] - pushed_s)
        others_part.clear()
        channels[0].exchange_row([1.0] * 4)
        assert others_part.wait(5.0)
    thread.join(5.0)
    assert [row for _, row in taken] == [row for number in range(10) for row in ([float(number)] * 4, None)]
    assert sorted(late_s)[5] < 0.003
    for segment in segments:
        segment.close()
