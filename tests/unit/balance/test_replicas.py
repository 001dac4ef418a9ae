"""Whether replicas are worth their place: simulated processes in, decisions out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from evenload.balance.contention import Contention, ReplicaObservation, contention
from evenload.balance.replicas import ReplicaBalancer
from evenload.errors import ConfigError
from tests.unit.balance.short_steps import KINDS, LEAD, Moment


class Machine:
    """A process whose replicas need `per_sample_s` each; `slowed(active)` times as long where others compute too."""

    def __init__(
        self,
        per_sample_s: list[float],
        slowed: Callable[[tuple[int, ...]], float] = lambda active: 1.0,
        off_cpu: bool = True,
        noise: float = 0.0,
        **options: object,
    ) -> None:
        self.per_sample_s, self.slowed, self.off_cpu = per_sample_s, slowed, off_cpu
        self.random, self.noise = random.Random(0), noise
        self.balancer = ReplicaBalancer(64, len(per_sample_s), **options)  # type: ignore[arg-type]
        self.shares, self.num_micro = self.balancer.shares, self.balancer.num_micro
        self.coming: list[tuple[int, tuple[int, ...], int]] = []
        self.told: list[tuple[int, str, tuple[int, ...], str]] = []
        self.found: list[Contention] = []
        self.turns: list[int] = []
        self.history: list[tuple[int, ...]] = []
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for at, shares, count in list(self.coming):
                if at == self.step:
                    self.shares, self.num_micro = shares, count
                    self.coming.remove((at, shares, count))
            in_turns = self.balancer.takes_turns
            active = tuple(r for r, share in enumerate(self.shares) if share)
            factor = 1.0 if in_turns or len(active) == 1 else self.slowed(active)
            jitter = [1 + self.noise * self.random.uniform(-1, 1) for _ in self.shares]
            plain = [share * cost for share, cost in zip(self.shares, self.per_sample_s, strict=True)]
            own = [time * factor * j for time, j in zip(plain, jitter, strict=True)]
            cpu = [p * j if self.off_cpu else o for p, o, j in zip(plain, own, jitter, strict=True)]
            if in_turns:
                self.turns.append(self.step)
            seen = ReplicaObservation(
                self.step,
                self.shares,
                self.num_micro,
                tuple(own),
                tuple(cpu),
                sum(own) if in_turns else max(own),
                in_turns,
                left_out=self.step == 0,
            )
            decision = self.balancer.observe(seen)
            if (found := self.balancer.take_contention()) is not None:
                self.found.append(found)
            if decision is not None:
                self.told.append((self.step, decision.kind, decision.shares, decision.reason))
                self.coming.append((self.step + 1 + LEAD, decision.shares, decision.num_micro))
            self.history.append(self.shares)
            self.step += 1

    @property
    def aloud(self) -> list[tuple[int, str, tuple[int, ...], str]]:
        return [one for one in self.told if one[3]]


def test_unequal_replicas_get_what_they_are_worth_and_stay() -> None:
    machine = Machine([0.001, 0.002], noise=0.01)
    machine.run(120)
    assert machine.shares == (43, 21)
    assert len(machine.turns) == 2 and len(machine.found) == 1
    assert machine.found[0].gain == pytest.approx(1.0, abs=0.03)
    assert any(shares == (64, 0) for shares in machine.history), "without the second was tried"
    assert [kind for _, kind, _, _ in machine.aloud] == ["measured"]


def test_one_that_takes_more_than_it_gives_is_left_out_and_told_with_figures() -> None:
    machine = Machine([0.001, 0.030], slowed=lambda active: 1.3, noise=0.01)
    machine.run(150)
    assert machine.shares == (64, 0)
    (_, kind, shares, reason) = machine.aloud[-1]
    assert (kind, shares) == ("left_out", (64, 0))
    assert "rank 1 only slows the rest" in reason and " ms without" in reason and "→ 0 of 64" in reason
    assert machine.balancer.costs is not None


def test_a_disturbance_during_a_trial_loses_no_device() -> None:
    machine = Machine([0.001, 0.001])
    while not machine.told or machine.told[-1][1] != "trial":
        machine.run(1)
    usual = machine.per_sample_s
    machine.per_sample_s = [0.0004, 0.001]  # as if something else had ended just now
    machine.run(8)
    machine.per_sample_s = usual
    machine.run(150)
    assert machine.shares == (32, 32)


def test_a_device_far_too_slow_for_one_sample_gets_none() -> None:
    machine = Machine([0.001, 0.5])
    machine.run(120)
    assert machine.shares == (64, 0)


def test_the_slowest_of_three_is_left_out_alone() -> None:
    machine = Machine([0.001, 0.001, 0.012], slowed=lambda active: 1.2 if 2 in active else 1.0)
    machine.run(200)
    assert machine.shares == (32, 32, 0)
    assert [kind for _, kind, _, _ in machine.aloud if kind == "left_out"] == ["left_out"]


def test_one_left_out_returns_when_it_helps() -> None:
    disturbed = {"now": True}
    machine = Machine([0.001, 0.002], slowed=lambda active: 2.0 if disturbed["now"] else 1.0)
    machine.run(200)
    assert machine.shares == (64, 0)
    disturbed["now"] = False
    machine.run(1300)
    assert machine.shares == (43, 21)
    assert machine.aloud[-1][1] == "returned" and "helps again" in machine.aloud[-1][3]


def test_contention_is_what_replicas_wait_off_the_processor() -> None:
    machine = Machine([0.001, 0.001], slowed=lambda active: 1.5)
    machine.run(60)
    (found,) = machine.found
    assert found.side_by_side_s == pytest.approx(0.048) and found.separate_s == pytest.approx(0.032)
    assert found.waiting_s == pytest.approx((0.016, 0.016)) and found.alone_s == pytest.approx((0.032, 0.032))
    assert found.gain == pytest.approx(1.5)
    # Slower on the processor itself (memory, caches, a shared core): processes of their own would be slowed as much.
    same = Machine([0.001, 0.001], slowed=lambda active: 1.5, off_cpu=False)
    same.run(60)
    assert same.found[0].gain == pytest.approx(1.0)


def test_fixed_shares_are_measured_and_never_moved() -> None:
    machine = Machine([0.001, 0.03], slowed=lambda active: 1.5, shares=(48, 16), adapts=False)
    machine.run(200)
    assert machine.told == [] and machine.shares == (48, 16)
    assert len(machine.found) == 1 and len(machine.turns) == 2


def test_a_trial_ends_where_memory_runs_out() -> None:
    machine = Machine([0.001, 0.001])
    while not machine.told or machine.told[-1][1] != "trial":
        machine.run(1)
        assert machine.step < 80
    machine.run(3)
    assert machine.shares in ((64, 0), (0, 64))
    back = machine.balancer.set_caps((16, 16))
    assert back is not None and back.shares == (32, 32) and back.num_micro >= 2
    assert machine.balancer.costs is not None


def test_steps_of_other_sizes_and_unusual_ones_say_nothing() -> None:
    balancer = ReplicaBalancer(64, 2)
    ragged = ReplicaObservation(1, (8, 8), 1, (0.1, 0.2), (0.1, 0.2), 0.2, False)
    unusual = ReplicaObservation(2, (32, 32), 1, (0.1, 0.2), (0.1, 0.2), 0.2, False, left_out=True)
    for _ in range(60):
        assert balancer.observe(ragged) is None and balancer.observe(unusual) is None
    assert not balancer.takes_turns


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="sum to 60: expected 2 of them, 64"):
        ReplicaBalancer(64, 2, shares=(30, 30))


def test_contention_of_replicas_without_samples() -> None:
    one = ReplicaObservation(0, (64, 0), 1, (0.064, 0.0), (0.064, 0.0), 0.064, False)
    assert contention([one], [one]) == Contention(0.064, (0.064, 0.0), (0.0, 0.0), 0.064)


@pytest.mark.parametrize(
    "kind",
    [
        "0.1 ms, stalls",
        "0.6 ms, bursts",
        "1 ms, heavy tail",
        "2 ms, two modes",
        "3 ms, other programs",
        "5 ms, heavy tail",
    ],
)
def test_equal_replicas_with_short_steps_stay_equal(kind: str) -> None:
    usual_s, fixed, noise = KINDS[kind]
    rng, balancer, now_s, notes = random.Random(kind), ReplicaBalancer(64, 2), 0.0, []
    shares, coming = balancer.shares, []
    for step in range(3000):
        while coming and coming[0][0] <= step:
            shares = coming.pop(0)[1]
        assert max(abs(share - 32) for share in shares) <= 3.2, (step, shares)
        in_turns = balancer.takes_turns
        parts = [(fixed + (1 - fixed) * share / 32) * usual_s for share in shares]
        own_s = tuple(max(1e-6, noise(rng, Moment(part, rank, step, now_s, 2))) for rank, part in enumerate(parts))
        together_s = sum(own_s) if in_turns else max(own_s)
        now_s += together_s + 0.0003
        seen = ReplicaObservation(step, shares, 1, own_s, own_s, together_s, in_turns, step == 0, together_s + 0.0003)
        decision = balancer.observe(seen)
        if decision is not None:
            assert not balancer.foresees, "no gain is announced"
            coming.append((step + LEAD, decision.shares))
        notes.append(balancer.take_note())
    assert sum(note is not None for note in notes) <= 1


def test_one_that_slows_short_steps_is_left_out_only_where_the_gain_is_certain() -> None:
    machine = Machine([0.00003, 0.00003], slowed=lambda active: 4.0, noise=0.2)
    machine.run(4000)
    assert machine.shares == (64, 0) and "only slows the rest" in machine.aloud[-1][3]
    # Where all of a batch takes one replica as long as a half takes both, nothing is certain: both stay.
    machine = Machine([0.00003, 0.00003], slowed=lambda active: 2.0, noise=0.2)
    machine.run(4000)
    assert set(machine.history) == {(32, 32)} and machine.told == []
