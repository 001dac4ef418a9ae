"""`Pipeline`: several sums in progress, each at its own stage.

A sum begins its first collective where it is started, in the middle of a backward. A thread for each stage waits for the
collectives of that stage in order, and lets each sum go on to its next one. So all ranks begin the collectives of a stage in the
order in which sums were started, and the link is busy while another sum is encoded or decoded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from evenload.training.comm.collective_errors import collective_error
from evenload.training.comm.pending import Pending
from evenload.training.parallel.wire.bucket_sum import Steps

_END_WAIT_S = 5.0

Begin = Callable[[dist.Work | None, bool], Pending]
"""`Groups.begin`: registers a collective, which an abort then ends."""

_Item = tuple[Steps, Pending, Pending]
"""A sum, its collective in progress, and what its end completes."""


class Pipeline:
    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._queues: list[queue.SimpleQueue[_Item | None]] = []
        self._threads: list[threading.Thread] = []
        self._ends: list[Pending] = []
        """Of sums that may be in progress."""
        self._stream: torch.cuda.Stream | None = None

    def start(self, steps: Steps) -> Pending:
        """Begin a sum; the result ends with it."""
        end = self._begin(None, True)
        self._ends = [*(other for other in self._ends if not other.done), end]
        self._advance(steps, end, 0)
        return end

    def start_on_gpu(self, steps: Steps, device: torch.device) -> torch.cuda.Event:
        """Begin a sum of which every part is queued on a GPU; the event follows it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for work in steps:
                work.wait()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return event

    def close(self) -> None:
        """End the threads; one that waits for a sum that this rank has given up ends with the groups."""
        is_idle = all(end.done for end in self._ends)
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(_END_WAIT_S if is_idle else 0.0)

    def _advance(self, steps: Steps, end: Pending, stage: int) -> None:
        try:
            work = next(steps)
        except StopIteration:
            end.complete()
            return
        except RuntimeError as error:
            end.fail(collective_error(error, "the gradients could not be summed"))
            return
        except Exception as error:  # whatever it is, it belongs to the thread that waits
            end.fail(error)
            return
        if stage == len(self._queues):
            self._queues.append(queue.SimpleQueue())
            thread = threading.Thread(
                target=self._run, args=(self._queues[-1], stage), name=f"evenload-wire-{stage}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._queues[stage].put((steps, self._begin(work, True), end))

    def _run(self, waiting: queue.SimpleQueue[_Item | None], stage: int) -> None:
        while (item := waiting.get()) is not None:
            steps, work, end = item
            try:
                work.wait()
            except Exception as error:  # as above
                end.fail(error)
                continue
            self._advance(steps, end, stage + 1)
