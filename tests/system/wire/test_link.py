"""Two machines: the bytes that each format sends, counted on the interface, and what a run reports of the link."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from evenload.balance.wire_bytes import FORMATS, GradientSize, sent_bytes
from evenload.records.reader import read_events
from evenload.testing import hosts
from tests.warm import Command

SCRIPT = """
import json, time, torch, evenload
from torch import nn
from torch.distributed import rpc
from torch.utils.data import DataLoader, TensorDataset

def sent():
    # Bytes that left over eth0, as the kernel counts them.
    line = next(line for line in open("/proc/self/net/dev") if "eth0" in line)
    return int(line.split(":")[1].split()[8])

def sent_when_idle():
    # The last packets of a step may wait in the shaped link's queue.
    counts = [sent()]
    while len(counts) < 4 or counts[-1] - counts[-4] > 500:
        time.sleep(0.03)
        counts.append(sent())
    return counts[-1]

found = {}
for name in ("fp32", "bf16", "fp16", "int8", "powersgd"):
    torch.manual_seed(0)
    run = evenload.init(project_dir=f"runs/{name}", wire=name, check_every="off")
    loader = DataLoader(TensorDataset(torch.randn(96, 512), torch.randn(96, 512)), batch_size=8)
    model, loader = run.prepare(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = 0
    for step in loader:
        if step.index == 6:
            before = sent_when_idle()
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step(); optimizer.zero_grad()
    found[name] = (sent_when_idle() - before) / 6
    run.close()
for name in ("fp32", "int8"):  # islands: twice in six steps
    torch.manual_seed(0)
    run = evenload.init(project_dir=f"runs/local-{name}", strategy="local", sync_every=3, wire=name)
    loader = DataLoader(TensorDataset(torch.randn(96, 512), torch.randn(96, 512)), batch_size=8)
    model, loader = run.prepare(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = 0
    for step in loader:
        if step.index == 6:
            before = sent_when_idle()
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step(); optimizer.zero_grad()
    run.close()
    found[f"local-{name}"] = (sent_when_idle() - before) / 6
# The machines have one kernel, so RPC would copy from the memory of one process to that of the other.
class OverTheLink(rpc.TensorPipeRpcBackendOptions):
    def __init__(self, **options):
        super().__init__(**options | {"_transports": ["uv"], "_channels": ["basic"]})

rpc.TensorPipeRpcBackendOptions = OverTheLink
for name, settings in (
    ("fragments", {"strategy": "local", "sync_every": 3, "fragments": 3}),  # each in one of three steps
    ("async", {"strategy": "async"}),  # a machine has the server, the other one the worker
):
    torch.manual_seed(0)
    run = evenload.init(project_dir=f"runs/{name}", **settings)
    loader = DataLoader(TensorDataset(torch.randn(96, 512), torch.randn(96, 512)), batch_size=8)
    model, loader = run.prepare(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    for step in loader:
        if step.index % 3 == 0:
            counts.append(sent_when_idle())
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step(); optimizer.zero_grad()
    run.close()
    found[name] = (counts[3] - counts[2]) / 3 if name == "fragments" else (sent_when_idle() - counts[2]) / 6
json.dump(found, open("bytes.json", "w"))
"""
SIZE = GradientSize(512 * 1024 * 2 + 1024 + 512, 4, ((1024, 512), (512, 1024)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("link")
    with hosts.machines(2, mbit_per_s=200) as boxes:
        for box in boxes:
            (folder / box.name).mkdir()
            (folder / box.name / "train.py").write_text(SCRIPT)
        for screen, options in (("screen", ()), ("dry", ("--dry-run",))):
            processes = []
            for box in boxes:
                own = folder / box.name
                command = ["-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", "2", "--host", "box1", *options]
                processes.append(Command([*command, "train.py"], own, os.environ, host=box, output=own / screen))
            codes = [process.wait(150) for process in processes]
            assert codes == [0, 0], [(folder / box.name / screen).read_text() for box in boxes]
    return [folder / "box1", folder / "box2"]


@pytest.mark.slow
def test_bytes_on_the_interface_are_those_of_the_docs(folders: list[Path]) -> None:
    for folder in folders:
        counted: dict[str, float] = json.loads((folder / "bytes.json").read_text())
        for name in FORMATS:
            # Rows of control, and packets without data: 4 to 8 kB a step, whatever the model.
            rest = counted[name] - sent_bytes(name, SIZE, 2)
            assert abs(rest) < 0.05 * sent_bytes(name, SIZE, 2) + 10e3, (name, counted)
        for name in ("fp32", "int8"):
            expected = sent_bytes(name, SIZE, 2) / 3
            assert abs(counted[f"local-{name}"] - expected) < 0.05 * expected + 10e3, (name, counted)
        # Of async, each machine sends 4 bytes a parameter and part: the server parameters, the worker gradients.
        for name, expected in (("fragments", sent_bytes("fp32", SIZE, 2) / 3), ("async", 4.0 * SIZE.num_values)):
            assert abs(counted[name] - expected) < 0.05 * expected + 10e3, (name, counted)


@pytest.mark.slow
def test_a_run_reports_link_difference_and_advice(folders: list[Path]) -> None:
    events = {name: {e.kind: e.fields for e in read_events(folders[0] / "runs" / name)} for name in FORMATS}
    for direction in ("both_bytes_per_s", "up_bytes_per_s"):
        # The link has 25 MB/s each way. A busy machine may not keep up in one of the runs, and no run is faster.
        assert max(found["link"][direction] for found in events.values()) == pytest.approx(25e6, rel=0.25)
        assert min(found["link"][direction] for found in events.values()) > 5e6
    for name, found in events.items():
        assert found["advice"]["cheapest_exact"] == 'wire="fp32"'
        settings = [option["setting"] for option in found["advice"]["options"]]
        assert 'strategy="local", sync_every=20, fragments=4' in settings and settings[-1] == 'strategy="async"'
        assert ("wire" in found) == (name != "fp32")
    said = next(e.message for e in read_events(folders[0] / "runs" / "int8") if e.kind == "link")
    assert "Cheapest with the exact result: wire=" in said and "wire=int8 is not exact" in said
    assert events["int8"]["wire"]["difference"] == pytest.approx(8e-3, rel=0.5)
    assert events["bf16"]["wire"]["difference"] == pytest.approx(1.7e-3, rel=0.4)
    assert events["fp16"]["wire"]["difference"] < 5e-4


@pytest.mark.slow
def test_a_dry_run_predicts_steps_from_what_an_earlier_run_computed(folders: list[Path]) -> None:
    text = (folders[0] / "dry").read_text()
    compute_s = next(e.fields["compute_s"] for e in read_events(folders[0] / "runs" / "fp32") if e.kind == "advice")
    assert f"a step computed for {compute_s:.3g} s on the slowest rank" in text
    predicted = re.search(r'wire="fp32": 4.2 MB, ([0-9.e-]+) s a step', text)
    assert predicted and 0.15 < float(predicted[1]) < compute_s + 1.0, (
        text
    )  # 4.2 MB at 25 MB/s, or less on a busy machine
    assert "cheapest: wire=" in text


LATE = """
import torch, evenload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evenload.init(project_dir="runs/late", check_every="off")
model, loader = run.prepare(nn.Linear(8, 8), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in loader:
    step.backward(lambda batch: model(batch[0]).square().mean())
    optimizer.step(); optimizer.zero_grad()
run.close()
"""


@pytest.mark.slow
def test_the_latency_of_a_sum_is_that_of_two_rounds(tmp_path: Path) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(LATE)
    with hosts.machines(2, delay_ms=10.0) as boxes:
        processes = []
        for box in boxes:
            (tmp_path / box.name).mkdir()
            command = ["-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", "2", "--host", "box1", "../train.py"]
            processes.append(
                Command(command, tmp_path / box.name, os.environ, host=box, output=tmp_path / f"{box.name}.txt")
            )
        codes = [process.wait(100) for process in processes]
    assert codes == [0, 0], [(tmp_path / f"{box.name}.txt").read_text() for box in boxes]
    found = next(e.fields for e in read_events(tmp_path / "box1" / "runs" / "late") if e.kind == "link")
    # A round trip takes 20 ms. A sum of one value would need only one.
    assert 0.038 < found["latency_s"] < 0.08
