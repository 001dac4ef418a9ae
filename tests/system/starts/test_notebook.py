"""From a real Jupyter kernel: functions of cells on several devices, their errors, the interrupt; the example notebook."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT
from tests.ranks.exact.measure import BOUND, relative
from tests.system.launch.scripts import assert_gone
from tests.system.starts.kernel import CellError, Kernel, open_kernel
from tests.system.starts.ways import scripts

EXAMPLE = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with open_kernel(folder) as opened:
        yield opened


def cells() -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(EXAMPLE.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_example(kernel: Kernel, folder: Path) -> None:
    printed = "".join(kernel.run(cell) for cell in cells())
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+)\n", printed)[0])
    assert last < first
    found = re.search(r"shares \((\d+), (\d+)\), loss .* largest difference (\S+)\n", printed)
    assert found is not None, printed
    assert int(found[1]) + int(found[2]) == 96
    assert float(found[3]) < 1e-5  # the model computes in float32
    assert (folder / "runs" / "notebook" / "steps.jsonl").exists()


def test_the_weights_are_the_same(kernel: Kernel, folder: Path, table: dict[str, float]) -> None:
    """The page's script, its function defined in a cell: here in the kernel's process, then on two ranks."""
    cell, guard, _ = scripts()["train.py"].partition('if __name__ == "__main__":')
    assert guard
    kernel.run(cell)
    weights = []
    for call in ("main(2)", 'evenload.spawn(main, devices="cpu:2", args=(2,))'):
        printed = kernel.run(f"print({call})")
        world_size = 2 if "spawn" in call else 1
        assert printed.count(f" of {world_size} on cpu: loss ") == world_size, printed
        state = torch.load(folder / "weights.pt", weights_only=True)
        weights.append(torch.cat([value.flatten() for value in state.values()]))
        (folder / "weights.pt").unlink()
    table["evenload.spawn from a notebook"] = difference = relative(weights[1], weights[0])
    assert difference <= BOUND
    assert (folder / "runs" / "interactive" / "steps.jsonl").exists(), "the run folder has another name"


def test_an_error_of_a_rank_is_the_cells(kernel: Kernel) -> None:
    kernel.run("import evenload\ndef broken():\n    table = {}\n    return table['missing']")
    with pytest.raises(CellError) as caught:
        kernel.run("evenload.spawn(broken, devices='cpu')")
    told = str(caught.value)
    assert "RankFailedError: rank 0 (cpu) failed: KeyError: 'missing'" in told and "in broken" in told
    with pytest.raises(CellError, match="the globals that it uses can't be sent to another process"):
        kernel.run("import threading\nheld = threading.Lock()\nevenload.spawn(lambda: held, devices='cpu')")


def test_classes_of_cells_come_back_as_what_they_are(kernel: Kernel) -> None:
    kernel.run(
        "import pickle\nclass Point:\n    def __init__(self, x): self.x = x\n"
        "def double(point):\n    return pickle.loads(pickle.dumps(Point(point.x * 2)))"
    )
    assert (
        kernel.run("p = evenload.spawn(double, 'cpu', args=(Point(21),))\nprint(type(p) is Point, p.x)") == "True 42\n"
    )


def test_the_interrupt_ends_all_ranks(kernel: Kernel, folder: Path) -> None:
    kernel.run(
        "import os, time, evenload\ndef forever():\n    with open('pid.partial', 'w') as file: file.write(str(os.getpid()))\n"
        "    os.replace('pid.partial', 'pid')\n    time.sleep(1000)"
    )
    begun = kernel.begin("evenload.spawn(forever, devices='cpu')")
    deadline = time.monotonic() + 30
    while not (folder / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kernel.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        kernel.end(begun)
    assert_gone([int((folder / "pid").read_text())])
    # Not by its output: after an interrupt the kernel may send what a cell prints after the cell's end.
    kernel.run("open('after', 'w').close()")
    assert (folder / "after").exists()
