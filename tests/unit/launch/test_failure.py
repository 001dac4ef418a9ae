import re

import pytest
import torch

from evenload.errors import CheckpointError, DataError, PeerLostError, RankFailedError
from evenload.testing.ranks import run_ranks
from evenload.training.launch.failure import (
    FailureReport,
    describe_error,
    failure_path,
    is_consequence,
    read_failure,
    user_traceback,
    write_failure,
)


def _caught(fn):
    try:
        fn()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _misuse():
    run_ranks(print, 0)


def _library():
    # A frame of ours between the user's and the error.
    run_ranks(print, "two")


def test_our_error_points_at_the_users_line():
    text = user_traceback(_caught(_misuse))
    assert "in _misuse" in text and 'ranks.py", line' not in text
    assert text.rstrip().endswith("expected at least 1")


def test_of_an_error_in_the_users_code_only_his_frames_are_shown():
    def called_back(*_):
        raise KeyError("label")

    text = user_traceback(_caught(lambda: describe_error(_Odd(called_back), 0, 0)))
    assert "in called_back" in text and "in _caught" in text and "evenload/training" not in text


class _Odd(Exception):
    """Calls the user's code from Evenload's: its text is read there."""

    def __init__(self, called_back):
        self.called_back = called_back

    def __str__(self):
        return self.called_back()


def test_an_error_in_a_process_of_mp_spawn_is_cut_like_others():
    text = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/python/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 9, in train
    x = {}["label"]
KeyError: 'label'
"""
    failure = describe_error(RuntimeError(text), 0, 0)
    assert failure.kind == "KeyError" and failure.message.startswith(
        "'label' (in process of torch.multiprocessing.spawn 1"
    )
    assert "train.py" in failure.traceback and "spawn.py" not in failure.traceback


def test_of_another_error_the_last_of_our_frames_stays():
    text = user_traceback(_caught(_library))
    assert "in _library" in text and text.count("evenload/testing/ranks.py") == 1


def test_causes_are_cut_too_and_kept():
    def chained():
        try:
            _misuse()
        except ValueError as error:
            raise DataError("no data") from error

    text = user_traceback(_caught(chained))
    assert "direct cause" not in text and text.count("Traceback") == 1 and 'ranks.py", line' not in text
    assert re.search(r"caused by \w+: .*test_failure.py:\d+, in _misuse\)$", text.strip())


def test_a_failed_rank_is_told_by_its_own_traceback_alone():
    def spawned():
        raise RankFailedError("rank 0 failed: KeyError: 'x'\nTraceback (most recent call last):\n  ...")

    assert describe_error(_caught(spawned), 0, None).text().count("Traceback") == 1


def test_consequences():
    assert is_consequence(PeerLostError("gone"))
    assert is_consequence(CheckpointError("rank 0 failed to write the checkpoint", elsewhere=True))
    assert not is_consequence(CheckpointError("no space left"))
    assert is_consequence(RuntimeError("[gloo/pair.cc:535] Connection closed by peer [127.0.0.1]:23"))
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(ValueError("Connection closed by peer"))


def test_round_trip_and_story(tmp_path):
    failure = describe_error(_caught(_misuse), rank=1, step=4)
    assert read_failure(tmp_path, "worker-1") is None
    write_failure(failure, tmp_path, "worker-1")
    assert read_failure(tmp_path, "worker-1") == failure and failure_path(tmp_path, "worker-1").exists()
    assert failure.text("cpu").startswith("rank 1 (cpu) failed at step 4: ConfigError: run_ranks(num_ranks=0)")
    assert FailureReport(0, "killed by SIGKILL", "").text() == "rank 0 failed: killed by SIGKILL"


@pytest.mark.parametrize("text", ["[]", '{"colour": 1}'])
def test_a_torn_file_is_an_error(tmp_path, text):
    failure_path(tmp_path, "worker-0").write_text(text)
    with pytest.raises(Exception, match="can't be read"):
        read_failure(tmp_path, "worker-0")


def test_a_second_report_replaces_a_longer_one_and_a_huge_one_is_cut(tmp_path):
    for message in ("x" * 300_000, "long " * 100, "short"):
        write_failure(FailureReport(1, "ValueError", message), tmp_path, "worker-1")
        found = read_failure(tmp_path, "worker-1")
        assert (
            found.kind == "ValueError" and message.startswith(found.message) and len(found.message) >= len(message) / 16
        )
    assert found.message == "short"


def test_memory_that_runs_out_outside_the_backward_has_a_hint():
    def evaluate():
        model = torch.nn.ReLU()
        model.register_forward_pre_hook(lambda *_: torch.empty(1 << 52))
        model(torch.ones(1))

    def other():
        return torch.empty(1 << 52)

    def step():
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        optimizer = torch.optim.SGD([parameter], 0.1)
        optimizer.register_step_pre_hook(lambda *_: torch.empty(1 << 52))
        optimizer.step()

    assert "batch_size of the loader that run.batches receives" in describe_error(_caught(evaluate), 0, 3).message
    assert "hint" not in describe_error(_caught(other), 0, 3).message  # a dataset, or a model that is built or moved
    assert "Use fused=True" in describe_error(_caught(step), 0, 3).message
