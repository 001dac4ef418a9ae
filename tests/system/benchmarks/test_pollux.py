"""The emulation of Pollux' jobs against results worked out by hand, on tables that follow simple laws."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.pollux.learning import Learner, split_batch
from benchmarks.pollux.programs import EpochProgram
from benchmarks.pollux.tables import application
from benchmarks.pollux.workload import pollux_workload

from evenload.errors import ConfigError
from evenload.scheduler.core.values import Needs, Settings
from evenload.scheduler.simulator.cluster import DeviceShape, devices_of
from evenload.scheduler.simulator.programs import alone_s
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.simulator.workloads import read_workload
from tests.system.benchmarks.pollux_tables import (
    NUM_EPOCHS,
    STEPS,
    compute_s,
    sync_s,
    write_application,
    write_workload,
)


class TestTables:
    def test_steps_as_measured_and_between(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        assert app.step_s((2, 1), 8) == app.step_s((1, 2), 8) == pytest.approx((compute_s(8) + 0.106, 0.106))
        assert app.step_s((1,), 12) == pytest.approx((compute_s(12), 0.0))
        # On many hosts: between numbers of hosts and of devices, where the laws are linear.
        for shape in ((4, 4, 4, 4, 4, 4), (4, 4, 4, 4, 4, 4, 4, 4), (2, 2, 2, 2, 2), (4, 4, 4, 3, 3)):
            expected = sync_s(len(shape), sum(shape))
            assert app.step_s(shape, 16) == pytest.approx((compute_s(16) + expected, expected))

    def test_a_host_larger_than_those_measured_counts_as_several(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        assert app.step_s((8,), 8) == app.step_s((4, 4), 8)

    def test_gain_of_a_step(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app", sqr=1.0, var=7.0))
        assert app.gain(8, 0) == pytest.approx(1.0)
        assert app.gain(32, 0) == pytest.approx(8 / (7 / 4 + 1))
        assert app.gain(20, 0) == pytest.approx(8 / (7 * 8 / 20 + 1))

    def test_a_rigid_job_takes_its_steps(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        program = EpochProgram(app, 32, None)
        seconds = alone_s(program, DeviceShape((4,), ("gpu",) * 4, (1.0,) * 4))
        steps = NUM_EPOCHS * STEPS / app.gain(32, 0)
        assert seconds == pytest.approx(steps * (compute_s(8) + sync_s(1, 4)))
        report = program.report()
        assert report.done == pytest.approx(steps) and report.total == pytest.approx(steps)

    def test_large_batches_are_accumulated(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        assert (split_batch(app, 128, 2).local, split_batch(app, 128, 2).num_micro) == (32, 2)
        assert split_batch(app, 32, 1).num_micro == 2  # one device alone needs two for the gradient's noise

    def test_missing_tables_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="expected the tables of an application"):
            application(tmp_path / "nothing")


class TestLearning:
    def test_it_predicts_what_it_has_seen_and_learns_what_it_has_not(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        learner = Learner(app, host_size=4)
        assert learner.rates() == ()
        learner.set_gradient(1.0, 7.0)
        for shape in ((1,), (4,), (4, 4)):
            for local in (4, 8, 16):
                learner.observe(len(shape), sum(shape), local, app.step_s(shape, local))
        rates = learner.rates()
        assert len(rates) == 16
        for num, shape in ((1, (1,)), (4, (4,)), (8, (4, 4))):
            setting = learner.best(len(shape), num)
            step, sync = app.step_s(shape, setting.local)
            true = app.gain(num * setting.local * setting.num_micro, 0) / (
                step + (setting.num_micro - 1) * (step - sync)
            )
            assert rates[num - 1] == pytest.approx(true, rel=0.1)

    def test_it_dares_twice_what_it_ran_on(self, tmp_path: Path) -> None:
        app = application(write_application(tmp_path / "app"))
        learner = Learner(app, host_size=4)
        learner.observe(1, 2, 8, app.step_s((2,), 8))
        assert len(learner.rates()) == 4


def test_an_elastic_job_alone_grows_and_ends_sooner(tmp_path: Path) -> None:
    write_application(tmp_path / "traces" / "app")
    workload = write_workload(tmp_path / "workloads" / "w.csv", ("app-0", 0.0, "app", 1, 8))
    rigid = simulate(
        pollux_workload(workload), Conditions(devices_of("4x4"), Settings(policy="goodput", restart_s=1.0))
    )
    arrivals = pollux_workload(workload, elastic=True)
    settings = Settings(policy="goodput", restart_s=1.0)
    elastic = simulate(arrivals, Conditions(devices_of("4x4"), settings, interval_s=5.0))
    assert elastic.jobs[0].jct_s < 0.5 * rigid.jobs[0].jct_s
    assert [a.spec.needs for a in arrivals] == [Needs(1, 32)]
    assert max(sample.num_held for sample in elastic.samples) > 4


def test_plain_jobs_take_as_long_as_the_emulation(tmp_path: Path) -> None:
    write_application(tmp_path / "traces" / "app")
    rows = [("whole", 0.0, "app", 4, 32), ("across", 1.0, "app", 8, 128), ("split", 2.0, "app", 2, 128)]
    workload = write_workload(tmp_path / "workloads" / "w.csv", *rows)
    for plain, emulated in zip(read_workload(workload), pollux_workload(workload), strict=True):
        num = plain.spec.needs.min_devices
        shape = DeviceShape((4,) * (num // 4) or (num,), ("gpu",) * num, (1.0,) * num)
        assert alone_s(plain.make(), shape) == pytest.approx(alone_s(emulated.make(), shape), rel=0.01), plain.job
