"""`PartServer` without RPC: messages come in as its threads would put them."""

from __future__ import annotations

import pytest
import torch

from evenload.errors import PeerLostError
from evenload.training.parallel.asynchronous import server
from evenload.training.parallel.asynchronous.messages import Handout, PartGradient
from evenload.training.parallel.asynchronous.server import PartServer


def gradient(handout: Handout) -> PartGradient:
    assert handout.job is not None
    job = handout.job
    return PartGradient(job.number, job.version, job.worker, 1.0, False, 0.0, {}, {}, 0, 1, (), (), ())


def test_a_worker_that_hangs_is_given_up_long_before_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LEAST_HANG_S", 0.4)
    lost: list[tuple[int, str, list[int], bool]] = []
    parts = PartServer(
        [1, 2],
        staleness=4,
        timeout_s=600.0,
        report_lost=lambda rank, why, parts, hangs: lost.append((rank, why, list(parts), hangs)),
    )
    parts.begin(range(4))
    answers: dict[int, torch.futures.Future[Handout]] = {
        worker: parts.take(worker, reads_ahead=False) for worker in (1, 2)
    }

    def hands_in(worker: int) -> None:
        parts.put(gradient(answers[worker].wait()))
        answers[worker] = parts.take(worker, reads_ahead=False)

    def worker_1_computes() -> None:
        if answers[1].done() and answers[1].value().job is not None:
            hands_in(1)

    parts._receive()
    parts._hand_out()
    hands_in(2)  # it computes one part quickly, and hangs in its next one
    parts.on_wait = worker_1_computes
    arrived = []
    while (arrival := parts.next_arrival()) is not None:
        arrived.append(arrival.job.part)
    [(rank, why, [part], hangs)] = lost
    assert rank == 2 and hangs and why == f"it has computed part {part} for more than 0.4 s"
    assert sorted(arrived) == [0, 1, 2, 3]
    late = parts.take(2, reads_ahead=False)
    parts._receive()
    with pytest.raises((PeerLostError, RuntimeError), match="was given up"):
        late.wait()
