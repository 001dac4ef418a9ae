"""Wrong settings: refused before anything is trained, with what was set and what may be."""

import pytest

import evenload
from evenload.errors import ConfigError, LaunchError
from evenload.training.launch.environment import detect
from tests.ranks.wrong_uses.jobs import IMPORTS, command, evenload_run, script, told_by_ranks


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"precision": "fp8"}, r"init\(precision='fp8'\): expected one of no, bf16, fp16"),
        ({"precision": 16}, r"init\(precision=16\): expected one of no, bf16, fp16"),
        ({"strategy": "fsdp9"}, r"init\(strategy='fsdp9'\): expected one of ddp"),
        ({"wire": "int4"}, r"init\(wire='int4'\): expected one of fp32, bf16, fp16, int8, powersgd, auto"),
        ({"wire": "int8", "strategy": "dp"}, r"init\(wire='int8'\) has no effect with strategy='dp'"),
        ({"seed": "1"}, r"init\(seed='1'\): expected an integer"),
        ({"seed": -1}, r"init\(seed=-1\): expected an integer from 0"),
        ({"micro_batch": 0}, r"init\(micro_batch=0\): expected auto or a number of samples, at least 1"),
        ({"micro_batch": 2.5}, r"init\(micro_batch=2.5\): expected auto or a number"),
        ({"balance": "fast"}, r"init\(balance='fast'\): expected auto, even, or one integer share"),
        ({"balance": [0]}, "not all of them 0"),
        ({"balance": [1.5]}, "expected one integer share for each rank"),
        ({"balance": 16}, r"init\(balance=16\): expected auto, even"),
        ({"balance": [8, 8]}, r"init\(balance=\[8, 8\]\): 2 shares, but there are 1 ranks"),
        ({"batch_max": 1}, r"init\(batch_max=1\): expected a number of samples, more than the loader's batch_size"),
        ({"batch_max": "auto"}, r"init\(batch_max='auto'\): expected a number of samples"),
        (
            {"batch_lr": "linear", "batch_max": 64},
            r"init\(batch_lr='linear'\): expected one of auto, adascale, sqrt, none",
        ),
        ({"batch_lr": "sqrt"}, r"init\(batch_lr='sqrt'\) has no effect: .* set batch_max too, or leave it out"),
        ({"batch_norm": "sync"}, r"init\(batch_norm='sync'\): expected one of global, local"),
        ({"dataset_rng": True}, r"init\(dataset_rng=True\): expected one of keyed, off"),
        (
            {"num_workers": 4},
            r"init\(num_workers=4\): expected auto .* set a number on the loader itself: DataLoader\(num_workers=4\)",
        ),
        ({"num_workers": "many"}, r"init\(num_workers=.many.\): expected auto \(chosen by measurement\) or loader"),
        ({"check_every": 0}, r"init\(check_every=0\): expected off or a number of steps, at least 1"),
        ({"check_every": "often"}, r"init\(check_every=.often.\): expected off or a number of steps"),
        ({"loggers": "wandbb"}, "unknown logger 'wandbb'; expected tensorboard"),
        ({"loggers": 3}, r"init\(loggers=3\): expected the names of loggers"),
        ({"log_every_s": 0}, r"init\(log_every_s=0\): expected seconds, more than 0"),
        ({"timeout_s": "1min"}, r"init\(timeout_s='1min'\): expected seconds"),
        ({"project_dir": ""}, "expected a folder"),
        ({"project_dir": 3}, r"init\(project_dir=3\): expected a folder"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_expected(init, settings, told):
    with pytest.raises(ConfigError, match=told):
        init(**settings)


def test_an_unknown_setting_is_an_error(init):
    with pytest.raises(ConfigError, match="there is no setting 'sed'; did you mean 'seed'"):
        init(sed=1)


def test_init_twice(init):
    init()
    with pytest.raises(ConfigError, match="init was called twice; keep the run it returned"):
        init()


def test_the_name_of_a_missing_attribute_is_told():
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        evenload.initialise()


def test_a_run_folder_that_is_a_file(init, tmp_path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"the run folder .*run is not writable .*set project_dir to a writable folder"
    ):
        init()


def _never(run):
    return "went on"


def test_a_run_folder_that_is_a_file_ends_all_ranks(tmp_path):
    (tmp_path / "run").write_text("in the way")
    told = told_by_ranks(_never, tmp_path)
    assert "ConfigError: the run folder" in told[0] and "PeerLostError: another rank is gone" in told[1]


def test_a_logger_whose_package_is_missing(init, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"tensorboard cannot be imported; run pip install 'evenload\[tensorboard\]'"):
        init(loggers="tensorboard")


def _seed_by_rank():
    from evenload.training.launch.environment import detect

    try:
        evenload.init(project_dir="run", seed=detect().rank, precision="bf16", timeout_s=20)
    except ConfigError as error:
        return str(error)
    return "went on"


def test_settings_that_differ_between_ranks(tmp_path, monkeypatch):
    from evenload.testing import run_ranks

    monkeypatch.chdir(tmp_path)
    told = run_ranks(_seed_by_rank, 2)
    assert told == ["seed differs: rank 1 has another value than rank 0; give init the same settings on every rank"] * 2


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 with WORLD_SIZE=2: the rank must be from 0 to 1"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT must be integers"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR is not; start with `evenload run`"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "", "MASTER_PORT": ""}, "RANK, MASTER_ADDR, MASTER_PORT are not"),
    ],
)
def test_torchrun_variables_that_contradict(monkeypatch, variables, told):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **variables}.items():
        if value:
            monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=told):
        detect()


def test_no_other_rank_joins_the_rendezvous(tmp_path):
    text = IMPORTS + "evenload.init(project_dir='run', timeout_s=2.0)"
    (tmp_path / "train.py").write_text(text)
    ended = command(
        tmp_path, "train.py", RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9", LOCAL_RANK="1"
    )
    assert ended.code == 1 and "LaunchError: rank 1 could not join the other 1 ranks" in ended.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["nope.py"], "error: there is no script nope.py; scripts in that folder: train.py"),
        (["."], "is a folder; give the script in it"),
        (["-m", "no.such"], "error: -m no.such: there is no module no"),
        (["-d", "tpu", "train.py"], "error: -d tpu: 'tpu' is not a device; expected auto, all, cpu"),
        (["-d", "0,1,2,3,4,5,6,7,8", "train.py"], "here; here are: "),
        (["-d", "cpu:2", "--balance", "8,8,8", "train.py"], "--balance 8,8,8: 3 shares for 2 ranks (cpu, cpu)"),
        (["-d", "cpu:2", "--throttle", "1,0.5,1", "train.py"], "--throttle 1,0.5,1: 3 speeds for 2 ranks"),
        (["-d", "cpu:2", "--throttle", "1,0", "train.py"], "a speed is more than 0 and at most 1"),
        (["-d", "cpu:2", "--throttle", "1,1.5", "train.py"], "a speed is more than 0 and at most 1"),
        (["-d", "cpu:2", "--throttle", "1,fast", "train.py"], "--throttle 1,fast: expected one speed for each rank"),
        (["--check-every", "often", "train.py"], "--check-every often: expected off or a number of steps, at least 1"),
        (["-d", "cpu:2", "--num-workers", "4", "train.py"], "--num-workers 4: expected auto"),
        (["--sed", "1", "train.py"], "No such option: --sed"),
    ],
)
def test_a_wrong_command_is_refused_at_once(tmp_path, options, told):
    (tmp_path / "train.py").write_text("print('it ran')")
    ended = evenload_run(tmp_path, None, *options, within_s=15)
    assert ended.code == 2 and told in ended.stderr and "Traceback" not in ended.stderr and "it ran" not in ended.stdout


@pytest.mark.parametrize(("option", "code"), [("2", 1), ("1", 0)])
def test_a_setting_in_script_and_command_line(tmp_path, option, code):
    ended = evenload_run(tmp_path, script(settings=", seed=1"), "-d", "cpu:2", "--seed", option)
    assert ended.code == code
    told = "ConfigError: seed is set twice, differently: init(seed=1) in the script and --seed 2 on the command line"
    assert (told in ended.stderr) == bool(code)
    if code:
        assert 'run = evenload.init(project_dir="run", seed=1)' in ended.stderr
        assert "src/evenload" not in ended.stderr and ended.stderr.count("Traceback") == 1
