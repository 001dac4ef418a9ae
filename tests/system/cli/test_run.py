"""`evenload run` as a user types it: what is refused, what is passed on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.cli.main import COMMANDS, main
from tests.system.launch.scripts import run
from tests.unit.views.make_run import write_run


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it ran')")


def _refused(capfd, *arguments):
    with pytest.raises(SystemExit) as leave:
        main(["run", *arguments])
    output, error = capfd.readouterr()
    assert leave.value.code == 2 and "Traceback" not in error and "it ran" not in output + error
    return error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no script to run"),
        (["nope.py"], "no script nope.py"),
        (["."], "is a folder"),
        (["-m", "nope"], "no module nope"),
        (["-d", "cpu:x", "train.py"], "'cpu:x' is not a device"),
        (["-d", "cuda:7", "train.py"], "no GPU 7 here"),
        (["-d", "cpu:2", "--balance", "1,2,3", "train.py"], "3 shares for 2 ranks"),
        (["--balance", "half", "train.py"], "--balance half"),
        (["--balance", "0,0", "-d", "cpu:2", "train.py"], "not all of them 0"),
        (["--micro-batch", "0", "train.py"], "--micro-batch 0"),
        (["--precision", "fp8", "train.py"], "--precision fp8"),
        (["--batch-max", "1", "train.py"], "--batch-max 1: expected a number of samples"),
        (["--batch-max", "64", "--batch-lr", "linear", "train.py"], "--batch-lr linear: expected one of auto"),
        (["--strategy", "magic", "train.py"], "--strategy magic"),
        (["--seed", "-1", "train.py"], "--seed -1"),
        (["--project-dir", "caf\udce9", "train.py"], "expected a folder whose name is text in UTF-8"),
        (["-d", "cpu:2", "--throttle", "1", "train.py"], "1 speeds for 2 ranks"),
        (["-d", "cpu", "--throttle", "2", "train.py"], "more than 0 and at most 1"),
        (
            ["--nnodes", "2", "train.py"],
            "--host is missing; give the name or address of one of the machines, the same on all",
        ),
        (["--rdzv-endpoint", "box:29500", "train.py"], "the number of machines is missing: --nodes 2"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts -1: expected"),
        (["--nproc-per-node", "2", "-d", "cpu", "train.py"], "--nproc-per-node 2 and -d cpu both"),
        (["--nproc-per-node", "0", "train.py"], "expected a number of ranks"),
        (["-c", "nope.toml", "train.py"], "can't be read"),
        (["--no-such-option", "train.py"], "No such option"),
    ],
)
def test_wrong_uses_are_refused_with_a_reason(script, capfd, arguments, told):
    assert told in _refused(capfd, *arguments)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed = 2", "seed is set twice, differently: --seed 1 and seed = 2 in run.toml"),
        ("sed = 2", "there is no setting 'sed'"),
        ("seed = ", "invalid TOML"),
        ("port = 'a'", "expected a number from 0 to 65535"),
        ("precision = 'fp8'", "fp8"),
    ],
)
def test_wrong_files(script, capfd, text, told):
    Path("run.toml").write_text(text)
    assert told in _refused(capfd, "-d", "cpu", "--seed", "1", "-c", "run.toml", "train.py")


def test_settings_reach_the_workers_from_options_and_file(tmp_path):
    (tmp_path / "run.toml").write_text(
        "precision = 'bf16'\nseed = 5\nbalance = [3, 1]\ndevices = 'cpu:2'\nthrottle = [1, 0.5]\n"
    )
    body = "print(sorted(spec.settings.items()) if spec.rank == 0 else '')"
    options = ["-c", "run.toml", "--seed", "5", "--micro-batch", "4", "--fresh", "--log-every", "2"]
    code, stdout, stderr = run(tmp_path, body, *options)
    assert (code, stderr) == (0, "")
    expected = {
        "balance": [3, 1],
        "fresh": True,
        "log_every_s": 2.0,
        "micro_batch": 4,
        "precision": "bf16",
        "seed": 5,
    }
    assert str(sorted(expected.items())) in stdout


def test_an_output_that_takes_only_ascii_is_written(tmp_path, monkeypatch):
    """The signs of a report are escaped, and JSON is still JSON; before, it ended with a UnicodeEncodeError."""
    text = "\u2016\xe4g\U0001f600"
    out = tmp_path / "out"
    with out.open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit):
            main(["show", "nothere"])
        print(json.dumps(text, ensure_ascii=False), file=sys.stdout)
    assert json.loads(out.read_text(encoding="ascii")) == text


def test_a_dry_run_prints_ranks_and_settings_with_their_sources(tmp_path):
    (tmp_path / "run.toml").write_text("precision = 'bf16'\n")
    body = "print('dry', spec.settings['dry_run'])"
    code, stdout, _ = run(tmp_path, body, "--nproc-per-node", "2", "--dry-run", "--seed", "3", "-c", "run.toml")
    assert code == 0 and stdout.count("dry True") == 2
    assert "evenload: seed = 3 (--seed 3)" in stdout
    assert "evenload: precision = 'bf16' (precision = 'bf16' in run.toml)" in stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], []])
def test_help_loads_neither_torch_nor_numpy(arguments):
    code = (
        "import sys\nfrom evenload.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as leave:\n    assert not leave.code\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'rich', 'psutil'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "HEAVY []" in done.stdout, done.stderr
    if arguments in ([], ["--help"]):
        assert all(f"\n  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", ["None", "os.fsdecode(b'caf\\xe9')"])
def test_a_run_folder_whose_name_is_no_text_is_refused(tmp_path, name):
    folder = tmp_path / (os.fsdecode(b"caf\xe9") if name == "None" else "text")
    folder.mkdir()
    script = f"import os, evenload\nevenload.init(project_dir={name})\nprint('it ran')"
    code, stdout, stderr = run(folder, script, "-d", "cpu:2", initialised=False)
    assert code and "it ran" not in stdout and "expected a folder whose name is text in UTF-8" in stderr, (
        stdout + stderr
    )
    assert "UnicodeEncodeError" not in stderr and not list(folder.glob("runs/*")), stderr


def test_show_takes_a_run_folder_whose_name_is_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_run(folder, 5, faults=())
    command = [sys.executable, "-m", "evenload.cli.main", "show", str(folder)]
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    )
    assert shown.returncode == 0 and "caf\\udce9" in shown.stdout, shown.stdout + shown.stderr
    page = subprocess.run([*command, "--html"], capture_output=True, text=True, timeout=60)
    assert page.returncode == 2 and "a name is no text in UTF-8" in page.stderr and "Traceback" not in page.stderr
