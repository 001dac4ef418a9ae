"""`SharedSegment`: memory that the ranks of one host share, and `SharedChannel`, their exchanges of small rows through it.

The memory is an anonymous file (`memfd_create`): it has no name, so nothing is left when processes end in whatever way, and it
needs no room in /dev/shm. Each rank writes in slots of its own and then raises its sequence number; the others read when it has
risen. A slot has two buffers, used in turn. A rank raises its number to k + 1 only after it has read all rows of exchange k, so
nobody overwrites in exchange k + 2 what somebody still reads.

A rank that waits spins for a while and then sleeps in the kernel (futex) until the number rises. It spins for 20 µs, because
spinning uses up a CPU quota, but for 200 µs where waits are short: to be woken takes 50 to 200 µs, by which the rank would be
late in the next exchange. No socket closes when a peer dies, so a sleeping rank looks for the peer's process now and then.

Memory order: a row must be visible before its number. x86 keeps the order of stores and of loads, and CPython writes an aligned
8-byte item of a memoryview with one store. ARM keeps neither: it needs a release store and an acquire load, which Python does
not have, so `why_unavailable` refuses other machines.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.errors import DesyncError, PeerLostError

_LEAST_SPIN_NS, _MOST_SPIN_NS = 20_000, 200_000
_SHORT_WAIT_NS = 2 * _MOST_SPIN_NS
"""A wait that would have ended in a spin, but for the time that it takes to be woken."""
_SLEEP_NS = 50_000_000
"""Longest sleep without a look at the peers. A wake-up between a look and a sleep is lost, which costs this time once."""
LIVENESS_S = 0.2
LINE = 64
"""Bytes of a cache line: words that different ranks write are on different lines."""
_MEMBER_BYTES = 512
_REASON = slice(64, 448)
_CLOSED = 1
_ABORTED_BY = 1
"""Word of the segment that holds 1 + the index of the member that aborted it."""
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(frozen=True)
class SegmentMember:
    """Process of one rank; its start tells it from a later process with the same id."""

    rank: int
    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True)
class ChannelLayout:
    """Size of a channel; `num_writers` is 1 if the first member alone writes, otherwise the number of members."""

    num_writers: int
    row_bytes: int

    @functools.cached_property
    def buffer_bytes(self) -> int:
        return self.num_writers * self.slot_bytes

    @functools.cached_property
    def slot_bytes(self) -> int:
        return LINE + -(-self.row_bytes // LINE) * LINE

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.num_writers * LINE + 2 * self.buffer_bytes


def why_unavailable() -> str:
    """Return why ranks of this machine can't share memory, or nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, not {sys.platform} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or start_ticks(os.getpid()) < 0:
        return "this system has no memfd_create, or /proc can't be read"
    return ""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks after boot; -1 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    # The name in parentheses may contain anything.
    state, *rest = text[text.rindex(b")") + 2 :].split()
    return -1 if state in (b"Z", b"X") else int(rest[18])


class SpinTime:
    """The time for which to spin, from the waits so far: one short wait pays for a longer spin of the next."""

    def __init__(self) -> None:
        self.nanoseconds = _LEAST_SPIN_NS

    def add_wait(self, nanoseconds: int) -> None:
        """Take the length of a wait."""
        is_short = nanoseconds < _SHORT_WAIT_NS
        self.nanoseconds = _MOST_SPIN_NS if is_short else max(_LEAST_SPIN_NS, self.nanoseconds // 2)


class SharedSegment:
    """Memory of the ranks of one host, and the state of each: taking part, closed, or aborted."""

    def __init__(self, fd: int, members: Sequence[SegmentMember], rank: int, layouts: Sequence[ChannelLayout]) -> None:
        """Map the memory behind `fd`, made by `create` with the same members and layouts; the caller closes `fd`."""
        self.members = tuple(members)
        self.index = [member.rank for member in members].index(rank)
        """Position of this rank among the members."""
        self._memory = mmap.mmap(fd, _size(members, layouts))
        self.words = memoryview(self._memory).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._syscall = ctypes.CDLL(None).syscall
        self._syscall.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            *[ctypes.c_int] * 2,
            *[ctypes.c_void_p] * 2,
            ctypes.c_int,
        ]
        self._sleep = _Timespec(0, _SLEEP_NS)
        self._sleep_address = ctypes.addressof(self._sleep)
        self._layouts = tuple(layouts)
        self._pid = os.getpid()

    @staticmethod
    def create(members: Sequence[SegmentMember], layouts: Sequence[ChannelLayout]) -> int:
        """Make the memory and return its file descriptor; OSError if there is no room for it."""
        fd = os.memfd_create("evenload", os.MFD_CLOEXEC)
        try:
            # Otherwise a lack of memory would be found by SIGBUS at the first write.
            os.posix_fallocate(fd, 0, _size(members, layouts))
        except OSError:
            os.close(fd)
            raise
        return fd

    def channel(self, index: int, timeout_s: float) -> SharedChannel:
        """Return the exchange in the part of memory that `layouts[index]` describes."""
        return SharedChannel(self, *self.place(index), self._layouts[index], timeout_s)

    def place(self, index: int) -> tuple[mmap.mmap, int]:
        """Return the memory, and where the part begins that `layouts[index]` describes."""
        before = sum(layout.num_bytes for layout in self._layouts[:index])
        return self._memory, len(self.members) * _MEMBER_BYTES + before

    def abort(self, reason: str) -> None:
        """End every exchange of all members, now and later, with `PeerLostError(reason)`. Any thread of any rank may call it."""
        if os.getpid() != self._pid:  # a forked worker of a loader, which has inherited the memory
            return
        start = self.index * _MEMBER_BYTES
        text = reason.encode()[: _REASON.stop - _REASON.start]
        self._memory[start + _REASON.start : start + _REASON.start + len(text)] = text
        self.words[_ABORTED_BY] = self.index + 1
        self._wake_all()

    def close(self) -> None:
        """Leave: members that still wait for this rank learn that it is gone."""
        if os.getpid() == self._pid:
            self.words[self.index * _MEMBER_BYTES // 8] = _CLOSED
            self._wake_all()

    def check_aborted(self) -> None:
        """Raise PeerLostError if a member aborted the segment."""
        if aborted_by := self.words[_ABORTED_BY]:
            start = (aborted_by - 1) * _MEMBER_BYTES
            reason = self._memory[start + _REASON.start : start + _REASON.stop].rstrip(b"\0")
            raise PeerLostError(reason.decode(errors="replace"))

    def why_gone(self, index: int, *, look: bool) -> str:
        """Return why a member writes nothing more, or nothing; `look` for its process too."""
        member = self.members[index]
        if self.words[index * _MEMBER_BYTES // 8] == _CLOSED:
            return f"rank {member.rank} has closed its groups"
        if look and not member.alive:
            return f"the process {member.pid} of rank {member.rank} has ended"
        return ""

    def sleep(self, word: int, value: int, nanoseconds: int = _SLEEP_NS) -> None:
        """Sleep while the word has this value, for so long at most; other threads of this process run meanwhile."""
        self._sleep.nanoseconds = min(nanoseconds, _SLEEP_NS)
        self._syscall(_SYS_FUTEX, self._address + 8 * word, _FUTEX_WAIT, _signed32(value), self._sleep_address, None, 0)

    def wake(self, word: int) -> None:
        """Wake all who sleep on the word."""
        self._syscall(_SYS_FUTEX, self._address + 8 * word, _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def _wake_all(self) -> None:
        offset = len(self.members) * _MEMBER_BYTES
        for layout in self._layouts:
            for writer in range(layout.num_writers):
                self.wake((offset + writer * LINE) // 8)
            offset += layout.num_bytes


class SharedChannel:
    """A series of exchanges among the members of a segment, in which one thread of each rank takes part at a time."""

    def __init__(
        self, segment: SharedSegment, memory: mmap.mmap, offset: int, layout: ChannelLayout, timeout_s: float
    ) -> None:
        self._segment = segment
        self._memory = memory
        self._words = segment.words
        self._layout = layout
        self._timeout_s = timeout_s
        self._sequence = [(offset + writer * LINE) // 8 for writer in range(layout.num_writers)]
        self._peers = [writer for writer in range(layout.num_writers) if writer != segment.index]
        self._start = offset + layout.num_writers * LINE
        self._tables: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        """Views of the buffers; a model has few sizes of statistics."""
        self._round = 0
        self._unfinished = False
        self._spin = SpinTime()

    def exchange_row(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Exchange equally many float64 and return a copy of those of all members, shape ``(num_members, len(row))``.

        Raises:
            PeerLostError: a member is gone, or the segment was aborted.
            TimeoutError: a member is alive, but did not come in time.
            DesyncError: the members exchange different numbers of values.
        """
        code = _row_code(len(row))
        start = self._begin()
        slot_bytes = self._layout.slot_bytes
        code.pack_into(self._memory, start + self._segment.index * slot_bytes + LINE, *row)
        self._write_number(start, code.size)
        self._await_others(start, code.size)
        shape = self._layout.num_writers, len(row)
        return np.ndarray(shape, np.float64, self._memory, start + LINE, (slot_bytes, 8)).copy()

    def broadcast(self, row: bytes | None, num_bytes: int) -> memoryview:
        """Return the first member's bytes, valid until the members exchange rows again; the other members pass None.

        The first member must not come here again before all have read, which an exchange of rows in between ensures.
        """
        start = self._begin()
        if row is not None:
            self._memory[start + LINE : start + LINE + num_bytes] = row
        self._exchange(start, num_bytes)
        return memoryview(self._memory)[start + LINE : start + LINE + num_bytes]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all members, shape ``(num_members, len(own))``; errors as in `exchange_row`."""
        num_values = own.numel()
        step = self._layout.row_bytes // own.element_size()
        if num_values <= step:
            return self._publish(own).clone(memory_format=torch.contiguous_format)
        everyone = own.new_empty(len(self._sequence), num_values)
        for start in range(0, num_values, step):
            everyone[:, start : start + step] = self._publish(own[start : start + step])
        return everyone

    def sum(self, own: torch.Tensor) -> None:
        """Replace a vector by the sum over all members, added in their order: the same bits on each."""
        step = self._layout.row_bytes // own.element_size()
        for start in range(0, own.numel(), step):
            part = own if own.numel() <= step else own[start : start + step]
            _add_up(self._publish(part), part)

    def begin_sum(self, own: torch.Tensor) -> None:
        """Publish a vector of at most `row_bytes`, whose sum `end_sum` waits for; nothing else may come between them."""
        start = self._begin()
        self._table(start, own.dtype, own.numel())[self._segment.index].copy_(own)
        self._write_number(start, own.numel() * own.element_size())

    def end_sum(self, own: torch.Tensor) -> None:
        """Replace the vector of `begin_sum` by the sum over all members, as `sum` does."""
        start = self._start + self._round % 2 * self._layout.buffer_bytes
        self._await_others(start, own.numel() * own.element_size())
        _add_up(self._table(start, own.dtype, own.numel()), own)

    def next_of_first(self) -> tuple[int, int]:
        """Return the word in which the first member counts its exchanges, and its value once that has begun the next one."""
        return self._sequence[0], self._round + 1

    def abort(self, reason: str) -> None:
        """End the exchanges of all members; see `SharedSegment.abort`."""
        self._segment.abort(reason)

    def close(self) -> None:
        """Leave; see `SharedSegment.close`."""
        self._segment.close()

    def _publish(self, own: torch.Tensor) -> torch.Tensor:
        """Exchange vectors and return a view of all of them, valid until the next exchange but one."""
        start = self._begin()
        table = self._table(start, own.dtype, own.numel())
        table[self._segment.index].copy_(own)
        self._exchange(start, own.numel() * own.element_size())
        return table

    def _table(self, start: int, dtype: torch.dtype, num_values: int) -> torch.Tensor:
        key = start, dtype, num_values
        if key not in self._tables:
            layout = self._layout
            whole = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=layout.buffer_bytes)
            rows = whole.view(layout.num_writers, layout.slot_bytes)
            self._tables[key] = rows[:, LINE : LINE + num_values * dtype.itemsize].view(dtype)
        return self._tables[key]

    def _begin(self) -> int:
        """Begin an exchange and return the offset of its buffer. Where the last one was cut off, a peer may still read that."""
        if self._words[_ABORTED_BY]:
            self._segment.check_aborted()
        if self._unfinished:
            raise PeerLostError("an exchange before this one was interrupted")
        self._unfinished = True
        self._round += 1
        return self._start + self._round % 2 * self._layout.buffer_bytes

    def _exchange(self, start: int, num_bytes: int) -> None:
        """Publish this rank's slot of the buffer at `start`, and wait until all writers have published theirs."""
        if self._segment.index < len(self._sequence):
            self._write_number(start, num_bytes)
        self._await_others(start, num_bytes)

    def _write_number(self, start: int, num_bytes: int) -> None:
        """Publish what this rank has written in its slot of the buffer at `start`."""
        words, index = self._words, self._segment.index
        words[start // 8 + index * (self._layout.slot_bytes // 8)] = num_bytes
        word = self._sequence[index]
        words[word] = self._round
        self._segment.wake(word)

    def _await_others(self, start: int, num_bytes: int) -> None:
        words, segment, count = self._words, self._segment, self._round
        sizes, slot_words = start // 8, self._layout.slot_bytes // 8
        for writer in self._peers:
            if words[self._sequence[writer]] < count:
                began_ns = time.perf_counter_ns()
                self._wait(writer, count, began_ns)
                self._spin.add_wait(time.perf_counter_ns() - began_ns)
        for writer in self._peers:
            if words[sizes + writer * slot_words] != num_bytes:
                raise DesyncError(
                    f"rank {segment.members[segment.index].rank} exchanges {num_bytes} bytes and rank "
                    f"{segment.members[writer].rank} {words[sizes + writer * slot_words]}: they do different things"
                )
        self._unfinished = False

    def _wait(self, writer: int, count: int, began_ns: int) -> None:
        words, word = self._words, self._sequence[writer]
        yields_from_ns, spins_until_ns = began_ns + _LEAST_SPIN_NS, began_ns + self._spin.nanoseconds
        while (now_ns := time.perf_counter_ns()) < spins_until_ns:
            if words[word] >= count:
                return
            if now_ns > yields_from_ns:
                os.sched_yield()  # the writer may wait for this core
        now_s = time.monotonic()
        deadline_s, look_s = now_s + self._timeout_s, now_s + LIVENESS_S
        while (value := words[word]) < count:
            now_s = time.monotonic()
            self._segment.check_aborted()
            look = now_s >= look_s
            if look:
                look_s = now_s + LIVENESS_S
            behind = [other for other in self._peers if words[self._sequence[other]] < count]
            for other in behind:
                # It may have written its last row before it went.
                if (why := self._segment.why_gone(other, look=look)) and words[self._sequence[other]] < count:
                    raise PeerLostError(why)
            if now_s >= deadline_s:
                ranks = ", ".join(str(self._segment.members[other].rank) for other in behind)
                raise TimeoutError(f"timed out after {self._timeout_s:g} s; rank {ranks} did not come")
            self._segment.sleep(word, value)


def _add_up(table: torch.Tensor, total: torch.Tensor) -> None:
    """Write the sum of the rows, added in their order, into a vector."""
    first, *others = table.unbind()
    if len(others) == 1:
        torch.add(first, others[0], out=total)
        return
    total.copy_(first)
    for row in others:
        total.add_(row)


def _size(members: Sequence[SegmentMember], layouts: Sequence[ChannelLayout]) -> int:
    return len(members) * _MEMBER_BYTES + sum(layout.num_bytes for layout in layouts)


@functools.cache
def _row_code(num_values: int) -> struct.Struct:
    return struct.Struct(f"{num_values}d")


def _signed32(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)
