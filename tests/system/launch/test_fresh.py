"""Two starts with `--fresh` in one run folder at the same time: one of them gets it, the other ends with an error."""

import os

from tests.warm import Command

SCRIPT = """
import os, sys, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
own, other = sys.argv[1:]
run = evenload.init(project_dir="run")
Path(own).touch()
deadline_s = time.monotonic() + 40
while not Path(other).exists():
    assert time.monotonic() < deadline_s, "the other script has not begun"
    time.sleep(0.01)
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 1):
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
        run.checkpoint()
        time.sleep(0.3)
print("ended", own)
"""


def start(folder, own, other):
    words = ["-m", "evenload.cli.main", "run", "-d", "cpu", "--fresh", "train.py", own, other]
    return Command(words, folder, {**os.environ, "TMPDIR": str(folder)})


def test_one_of_two_fresh_starts_gets_the_folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with start(tmp_path, "first", "first") as alone:
        assert alone.communicate(60) and alone.returncode == 0
    both = [start(tmp_path, "a", "b"), start(tmp_path, "b", "a")]
    try:
        ended = [process.communicate(60) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait(10)
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 1], ended
    loser = next(stderr for process, (_, stderr) in zip(both, ended, strict=True) if process.returncode)
    assert "is in use by process" in loser or "is in use by another process" in loser, loser
    assert len(list(tmp_path.glob("run.*-*"))) == 1, "only the winner moves anything aside"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 3


def test_a_link_stays_and_what_it_points_to_is_moved(tmp_path):
    disk = tmp_path / "disk"
    (disk / "first").mkdir(parents=True)
    (tmp_path / "run").symlink_to("disk/first")
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("a", "b"):
        with start(tmp_path, name, name) as process:
            printed = process.communicate(60)
        assert process.returncode == 0, printed
    assert (tmp_path / "run").readlink().as_posix() == "disk/first"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 3
    [aside] = disk.glob("first.*-*")
    assert (aside / "events.jsonl").is_file() and f"moved the contents of run to {aside}" in printed[0]
    assert not list(tmp_path.glob("run.*")) and not list(disk.glob(".*"))
