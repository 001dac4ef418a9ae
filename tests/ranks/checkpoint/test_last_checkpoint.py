"""The last steps are saved when a script ends by an error: plain python, and one rank of several. Real processes."""

from __future__ import annotations

from pathlib import Path

from evenload.training.checkpoint import files
from tests.ranks.wrong_uses.jobs import command, evenload_run, script

_PREPARED = "run.resume(model=model, optimizer=optimizer)"


def _newest_step(folder: Path) -> int:
    newest = files.newest(folder / "run")
    return files.step_of(newest) if newest is not None else 0


def test_a_typo_after_the_loop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(prepared=_PREPARED) + "print(los)\n")
    ended = command(tmp_path, "train.py")
    assert ended.code == 1 and "NameError" in ended.stderr
    assert "checkpoint at step 8 (the script ended by an error)" in ended.stdout
    assert _newest_step(tmp_path) == 8


def test_an_error_on_one_rank_and_a_save_longer_than_any_clean_up(tmp_path: Path) -> None:
    slow = """
        run.resume(model=model, optimizer=optimizer)
        from evenload.training.checkpoint import files
        write = files.write
        files.write = lambda *arguments: (time.sleep(6), write(*arguments))
    """
    end = """
        if step.index == 5 and run.rank == 1:
            raise ZeroDivisionError("on one rank")
    """
    ended = evenload_run(tmp_path, script(prepared=slow, end=end), "-d", "cpu:2")
    assert ended.code == 1 and "rank 1 (cpu) failed at step 5: ZeroDivisionError: on one rank" in ended.stderr
    assert "checkpoint at step 6 (the script ended by an error" in ended.stdout
    assert _newest_step(tmp_path) == 6


def test_a_step_whose_optimizer_is_refused_is_not_saved_as_used(tmp_path: Path) -> None:
    """The repaired script would leave its samples out."""
    replaced = """
        if step.index == 3:
            import copy
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    """
    ended = evenload_run(tmp_path, script(prepared=_PREPARED, begin=replaced), "-d", "cpu:2")
    assert ended.code == 1 and "SGD steps 2 parameters that are in no model given to run.prepare" in ended.stderr
    assert "checkpoint at step 3 (the script ended by an error)" in ended.stdout
    another = """
        if step.index == 5:
            other = torch.nn.Linear(4, 1)
            other(torch.ones(4)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.01).step()
    """
    ended = evenload_run(tmp_path, script(prepared=_PREPARED, end=another), "-d", "cpu:2")
    assert ended.code == 1 and "an optimizer was refused after another one of the same step" in ended.stdout
    assert _newest_step(tmp_path) == 3
