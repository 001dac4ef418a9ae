"""How ranks leave where the interpreter ends them: the exit code is the script's, what was printed arrives, nobody waits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.system.starts import ways

SCRIPT = """
import sys, torch, evenload
from torch.utils.data import DataLoader, TensorDataset
run = evenload.init(project_dir=f"run-{sys.argv[1]}", log_every_s=1000)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
model, loader = run.prepare(model, DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4))
held = run.group([0, 1])
run.resume(model=model)
def loss_fn(batch):
    if run.rank == 1 and sys.argv[1] == "caught":
        raise ValueError("a broken batch")
    return model(batch[0]).square().mean()
try:
    for step in loader:
        step.backward(loss_fn)
        model.zero_grad()
        if sys.argv[1] == "unsaved":
            run.checkpoint(every="1h")
except ValueError:
    sys.exit(9)  # as torch.multiprocessing leaves a child that raised
print("no end of line", end="")
if sys.argv[1] == "codes":
    if run.rank == 0:
        sys.exit(7)
    raise RuntimeError("after the loop")
if sys.argv[1] == "unsaved" and run.rank == 0:
    open("run-unsaved/checkpoints", "w").close()  # where the last checkpoint would go
"""


def leave(folder: Path, *hows: str) -> dict[str, dict[str, Any]]:
    (folder / "leave.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = ways.run(folder, [sys.executable, "-m", "tests.system.starts.forked", "leave.py", *hows], PYTHONPATH=paths)
    assert ended.code == 0, ended.stderr
    return {one["how"]: one for one in map(json.loads, ended.stdout.splitlines())}


def test_ranks_end_as_their_script_does(tmp_path: Path) -> None:
    """Once each; `python -m benchmarks leaving` does it under torchrun, 20 times."""
    found = leave(tmp_path, "well", "codes", "caught", "unsaved")
    assert not any("terminate called" in text for one in found.values() for texts in one["wrote"] for text in texts)
    assert all("no end of line" in out for how in ("well", "codes", "unsaved") for out, _ in found[how]["wrote"])
    assert found["well"]["codes"] == [0, 0] and not any(err for _, err in found["well"]["wrote"])
    assert found["codes"]["codes"] == [7, 1] and "RuntimeError: after the loop" in found["codes"]["wrote"][1][1]
    # Rank 0 waits for BatchNorm's statistics when rank 1 leaves: it learns that at once, not after the timeout of 600 s.
    assert found["caught"]["codes"] == [1, 9] and "PeerLostError" in found["caught"]["wrote"][0][1]
    # What could not be saved at the end is no good end: rank 0, which writes for all, fails the run.
    assert found["unsaved"]["codes"] == [1, 0]
    assert ["UnwritableError" in err for _, err in found["unsaved"]["wrote"]] == [True, False]
