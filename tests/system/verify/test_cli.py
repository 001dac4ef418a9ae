"""`evenload verify` as a user types it, on scripts in files."""

import json
import subprocess
import sys

import pytest

from evenload.cli.main import main
from tests.warm import run

SCRIPT = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import evenload

run = evenload.init(project_dir="runs/it", seed=0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,))), batch_size=16, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters())
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 2):
    for step in loader:
        loss = step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="REDUCTION"))
        optimizer.step(); optimizer.zero_grad()
        run.log({"loss": loss})
        run.checkpoint(every=2)
    print("epoch", epoch, "ended", flush=True)
run.export("weights.pt")
"""


def evenload(folder, *arguments, script=SCRIPT, reduction="mean"):
    (folder / "train.py").write_text(script.replace("REDUCTION", reduction))
    done = run(["-m", "evenload.cli.main", *arguments], folder, 100, TMPDIR=str(folder))
    assert not list(folder.glob("evenload-*")), "a folder of the launch is left"
    return done.returncode, done.stdout, done.stderr


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_correct_script_ends_with_0_and_writes_nothing(tmp_path):
    code, stdout, stderr = evenload(tmp_path, "verify", "-d", "cpu:2", "train.py")
    assert (code, stderr) == (0, "")
    assert "equal: the split gives the gradients of one process" in stdout and "epoch 0 ended" not in stdout
    assert "16 = 12 + 4, in K = 1 micro-batches" in stdout and "float64" in stdout
    assert not (tmp_path / "runs").exists() and not (tmp_path / "weights.pt").exists()


def test_a_fault_ends_with_1_and_the_line_to_write(tmp_path):
    code, stdout, stderr = evenload(tmp_path, "verify", "-d", "cpu:2", "--balance", "15,1", "train.py", reduction="sum")
    assert (code, stderr) == (1, "")
    assert "DIFFERENT: " in stdout and "sum: the losses of 2 parts" in stdout and "reduction='mean'" in stdout
    assert "16 = 15 + 1" in stdout and "0.weight" in stdout


def test_json_is_all_there_is_on_stdout(tmp_path):
    script = "print('hello from the script')\n" + SCRIPT
    code, stdout, stderr = evenload(tmp_path, "verify", "--json", "train.py", script=script)
    report = json.loads(stdout)
    assert code == 0 and report["equal"] and "hello" in stderr
    assert report["calls"][0]["comparisons"][0]["difference"] < 1e-13


def test_an_existing_run_is_verified_from_its_checkpoint_and_left_as_it_was(tmp_path):
    code, _, stderr = evenload(tmp_path, "run", "-d", "cpu", "train.py", script=SCRIPT.replace("2):", "1):"))
    assert code == 0, stderr
    before = files(tmp_path / "runs")
    code, stdout, _ = evenload(tmp_path, "verify", "-d", "cpu:2", "train.py")
    assert code == 0 and "verify: step 3 on 2 ranks" in stdout
    code, stdout, _ = evenload(tmp_path, "verify", "-d", "cpu:2", "--fresh", "train.py")
    assert code == 0 and "verify: step 0 on 2 ranks" in stdout
    assert files(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (SCRIPT.replace("model(batch[0])", "model(batch[7])"), "IndexError"),
        (SCRIPT.replace("range(loader.epoch, 2)", "range(0)"), "ended without `step.backward(loss_fn)`"),
    ],
)
def test_what_could_not_be_verified_ends_with_2(tmp_path, script, told):
    code, stdout, stderr = evenload(tmp_path, "verify", "-d", "cpu:2", "train.py", script=script)
    assert code == 2 and told in stderr and "not verified" in stderr and "equal" not in stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no script to run"),
        (["nope.py"], "no script nope.py"),
        (["-d", "cpu:x", "train.py"], "'cpu:x' is not a device"),
        (["--balance", "1,2,3", "-d", "cpu:2", "train.py"], "3 shares for 2 ranks"),
        (["--throttle", "1,1", "train.py"], "No such option"),
    ],
)
def test_wrong_uses(tmp_path, monkeypatch, capfd, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(SystemExit) as leave:
        main(["verify", *arguments])
    output, error = capfd.readouterr()
    assert leave.value.code == 2 and told in error and "it ran" not in output + error


def test_help_loads_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom evenload.cli.main import main\ntry:\n    main(['verify', '--help'])\n"
        "except SystemExit as leave:\n    assert not leave.code\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'rich', 'psutil'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "HEAVY []" in done.stdout, done.stderr
