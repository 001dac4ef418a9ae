"""What each backend would send, as text; nobody is asked for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import backends
from evenload.scheduler.backends.interface import resolved
from evenload.scheduler.backends.kubernetes import KubernetesBackend
from evenload.scheduler.backends.node_command import NodeContext, command_on_node
from evenload.scheduler.backends.ray.backend import RayBackend
from evenload.scheduler.backends.slurm.backend import STATES, SlurmBackend
from evenload.scheduler.backends.slurm.script import script
from evenload.scheduler.job_file import JobFile, job_from

FULL: dict[str, Any] = {
    "command": ["evenload", "run", "train.py", "--seed", "{index}"],
    "name": "sweep",
    "devices": 8,
    "kind": "a100",
    "nodes": 2,
    "priority": -3,
    "time": "2h:10h",
    "after": ["12", "13:any", "14_2:failed"],
    "array": "0-3,7%2",
    "grace": "2m",
    "retries": 1,
    "notify": "mail:ann@lab.org",
    "environment": {"DATA": "/big disk/it's here"},
    "slurm": {
        "partition": "gpu",
        "account": "lab",
        "cpus_per_device": 6,
        "setup": "module load cuda",
        "python": "/opt/py",
    },
}


def a_job(backend: str, **changes: Any) -> JobFile:
    values = {"command": ["python", "train.py"], "kind": "cpu", **changes, "backend": backend}
    return resolved(job_from({key: value for key, value in values.items() if value is not None}), "/home/ann/work", {})


def test_slurms_script() -> None:
    request = SlurmBackend(Path("/home/ann/state")).build_request(a_job("slurm", **FULL))
    assert request.send == ("sbatch", "--parsable")
    assert (
        str(request)
        == """\
#!/bin/bash
# Written by `evenload submit --backend slurm`; submitted with `sbatch --parsable`.
#SBATCH --job-name=sweep
#SBATCH --output=/home/ann/state/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@135
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=24
#SBATCH --gres=gpu:a100:4
#SBATCH --time=120
#SBATCH --array=0-3,7%2
#SBATCH --dependency=afterok:12,afterany:13,afternotok:14_2
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mail-user=ann@lab.org
#SBATCH --mail-type=END,FAIL
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --nice=300
# the time limit is the soft limit: the job then saves and is requeued, until the hard limit is used up
cd /home/ann/work || exit 1
export DATA='/big disk/it'"'"'s here'
export EVENLOAD_ARRAY_INDEX="$SLURM_ARRAY_TASK_ID"
module load cuda
exec /opt/py -m evenload.scheduler.backends.slurm.job --root=/home/ann/state --grace=120 --spread --retries=1 \
--limit=36000 -- evenload run train.py --seed "$SLURM_ARRAY_TASK_ID"
"""
    )


def test_a_small_script_of_slurm() -> None:
    text = script(a_job("slurm", devices="2:4", memory="4GiB", priority=2, saves=True), Path("/s"), "python3")
    assert text.splitlines()[2:] == [
        "#SBATCH --job-name=python",
        "#SBATCH --output=/s/%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@75",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem-per-cpu=4096M",
        "# devices 2:4: Slurm does not resize jobs; the job gets the minimum",
        "# priority 2: only an admin can raise a job's priority in Slurm; ask for a qos",
        "cd /home/ann/work || exit 1",
        "exec python3 -m evenload.scheduler.backends.slurm.job --root=/s --grace=60 --goes-on -- python train.py",
    ]


NASTY = [
    "", " ", "it's", '"', "\\", "$HOME", "`id`", "$(id)", "a;b", "a|b&c", "*", "~", "#x", "!x", "a\nb", "\t", "--", "-x", "{a,b}",
    "é√", "\udce9", "\x7f", "'\"'\"'", "%j", "a\\\nb", "${index}", "#SBATCH --exclusive", "EOF",
]  # fmt: skip


def arguments_through_bash(words: list[str], tmp_path: Path, **changes: Any) -> list[str]:
    """The words as the program gets them from the script, by bash itself."""
    stub = tmp_path / "stub.py"
    stub.write_text("import json, sys\nprint(json.dumps(sys.argv[sys.argv.index('--') + 1:]))\n")
    job = resolved(JobFile(tuple(words), kinds=("cpu",), folder=str(tmp_path), backend="slurm", **changes), "/", {})
    text = script(job, tmp_path, "PYTHON").replace(
        "exec PYTHON -m evenload.scheduler.backends.slurm.job", "exec PYTHON stub.py"
    )
    text = text.replace("exec PYTHON", f"exec {shlex.quote(sys.executable)}")
    raw = text.encode(errors="surrogateescape")
    done = subprocess.run(["bash"], input=raw, capture_output=True, check=True, timeout=60)
    return [str(word) for word in json.loads(done.stdout)]


def test_nasty_words_through_bash(tmp_path: Path) -> None:
    assert arguments_through_bash(["program", *NASTY], tmp_path) == ["program", *NASTY]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=6))
def test_any_words_through_bash(tmp_path: Path, words: list[str]) -> None:
    assert arguments_through_bash(["program", *words], tmp_path) == ["program", *words]


def test_an_elements_index_is_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    words = ["p", "--seed={index}", "it's {index}{index}", "$HOME{index}", "{index}"]
    assert arguments_through_bash(words, tmp_path, array=(7,)) == ["p", "--seed=7", "it's 77", "$HOME7", "7"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"memory": "20G", "kind": "a100"}, "Slurm does not know the memory of a GPU"),
        ({"kind": ["a100", "h100"]}, "has one kind of device"),
        ({"notify": "webhook:https://x.org"}, "Slurm notifies only by mail"),
        ({"share_device": True}, "share_device"),
        ({"time": "2m"}, "Slurm would ask the program to save as soon as it starts"),
        ({"after": "train"}, "expected the id of a Slurm job"),
        ({"slurm": {"partitoin": "x"}}, "slurm has no such option; available: partition"),
        ({"slurm": {"partition": "a b"}}, "expected only letters, digits"),
        ({"slurm": {"partition": "a\n#SBATCH --uid=0"}}, "expected only letters, digits"),
        ({"slurm": {"root": "/a b"}}, "expected only letters, digits"),
        ({"slurm": {"root": "/a%j"}}, "expected only letters, digits"),
        ({"slurm": {"nice": "high"}}, "expected an integer >= "),
        ({"slurm": {"tasks": "rank"}}, "expected device or node"),
        ({"slurm": {"cpus_per_device": 2}}, "the devices are CPUs; remove it"),
        ({"kind": "a100 --uid=0"}, "expected only letters, digits"),
    ],
)
def test_what_slurm_cant_do(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SlurmBackend(Path("/s")).build_request(a_job("slurm", **changes))


def test_rays_text() -> None:
    request = RayBackend(root=Path("/s")).build_request(a_job("ray", devices="1:2", priority=1, environment={"A": "é"}))
    assert (request.folder, request.send) == ("/s", ())
    assert json.loads(str(request)) == {
        "backend": "ray",
        "command": ["python", "train.py"],
        "devices": "1:2",
        "environment": {"A": "é"},
        "folder": "/home/ann/work",
        "kind": ["cpu"],
        "priority": 1,
    }
    for changes, told in (
        ({"devices": 2, "nodes": 2}, "on Ray the queue chooses the nodes"),
        ({"share_device": True}, "whole devices"),
        ({"notify": "mail:a@b.c"}, "sends no notifications"),
        ({"ray": {"adress": "x"}}, "ray has no such option; available: address"),
    ):
        with pytest.raises(ConfigError, match=told):
            RayBackend().build_request(a_job("ray", **changes))


KUBERNETES = """\
# Written by `evenload submit --backend kubernetes`; submit it with `kubectl create -f FILE`.
apiVersion: "jobset.x-k8s.io/v1alpha2"
kind: "JobSet"
metadata:
  name: "gpt-2"
  labels:
    kueue.x-k8s.io/queue-name: "lab"
spec:
  suspend: true
  failurePolicy:
    maxRestarts: 1
    rules:
      - name: "failed"
        action: "RestartJobSet"
        onJobFailureReasons: ["PodFailurePolicy"]
      - name: "overTime"
        action: "FailJobSet"
        onJobFailureReasons: ["DeadlineExceeded"]
      - name: "savedOrMoved"
        action: "RestartJobSetAndIgnoreMaxRestarts"
        onJobFailureReasons: ["BackoffLimitExceeded"]
  replicatedJobs:
    - name: "nodes"
      replicas: 1
      template:
        spec:
          completions: 2
          parallelism: 2
          completionMode: "Indexed"
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: "Count"
                onPodConditions:
                  - type: "DisruptionTarget"
                    status: "True"
              - action: "FailJob"
                onExitCodes:
                  containerName: "program"
                  operator: "NotIn"
                  values: [75]
          template:
            spec:
              restartPolicy: "Never"
              terminationGracePeriodSeconds: 65
              containers:
                - name: "program"
                  image: "lab/gpt:1"
                  workingDir: "/home/ann/work"
                  command: ["evenload", "run", "--nodes=2", "--host=gpt-2-nodes-0-0.gpt-2:29500", \
"--node-rank=$(JOB_COMPLETION_INDEX)", "train.py", "$$HOME"]
                  env:
                    - name: "A"
                      value: "x: '$$(B)'"
                  resources:
                    limits:
                      nvidia.com/gpu: 4
                  volumeMounts:
                    - name: "kept"
                      mountPath: "/data"
              volumes:
                - name: "kept"
                  persistentVolumeClaim:
                    claimName: "runs"
              nodeSelector:
                nvidia.com/gpu.product: "A100"
          activeDeadlineSeconds: 3600
"""


def test_kubernetes_text() -> None:
    job = a_job(
        "kubernetes",
        command=["evenload", "run", "train.py", "$HOME"],
        name="GPT_2",
        devices=8,
        nodes=2,
        kind="A100",
        time=":1h",
        retries=1,
        environment={"A": "x: '$(B)'"},
        kubernetes={"image": "lab/gpt:1", "queue": "lab", "claim": "runs:/data"},
    )
    text = str(KubernetesBackend().build_request(job))
    assert text == KUBERNETES
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load(text)
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["template"]["spec"]["containers"][0]["env"] == [{"name": "A", "value": "x: '$$(B)'"}]


def test_an_array_on_kubernetes() -> None:
    job = a_job("kubernetes", command="p {index}", array="0-2", kubernetes={"image": "x"})
    documents = str(KubernetesBackend().build_request(job)).split("---\n")
    assert len(documents) == 3
    assert 'command: ["p", "2"]' in documents[2] and 'name: "p-2"' in documents[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kubernetes": {}}, "needs an image with the program"),
        ({"priority": 1}, "Kueue has named priority classes"),
        ({"after": "3"}, "Kueue can't start a job after another"),
        ({"time": "2h"}, "a soft time limit"),
        ({"kubernetes": {"image": "x", "claim": "here"}}, "expected CLAIM:PATH"),
    ],
)
def test_what_kubernetes_cant_do(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        KubernetesBackend().build_request(a_job("kubernetes", **{"kubernetes": {"image": "x"}, **changes}))


def test_kubernetes_is_text_alone() -> None:
    request = KubernetesBackend().build_request(a_job("kubernetes", kubernetes={"image": "x"}))
    for call in (
        lambda: KubernetesBackend().submit(request),
        lambda: KubernetesBackend().cancel("x"),
        lambda: KubernetesBackend().logs("x"),
    ):
        with pytest.raises(QueueError, match="kubectl"):
            call()


def test_backends_by_name() -> None:
    assert {name: backends.get(name).name for name in backends.NAMES} == {name: name for name in backends.NAMES}
    with pytest.raises(ConfigError, match="available backends: local, slurm, ray, kubernetes"):
        backends.get("sulrm")
    code = "import sys; from evenload.scheduler import backends; backends.get('ray'); sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0, (
        "a name loads no package"
    )


def test_a_job_is_settled_first() -> None:
    job = job_from({"command": "p", "inherit": ["TOKEN"], "environment": {"A": "1"}})
    with pytest.raises(ConfigError, match="TOKEN is inherited but not set in this shell"):
        resolved(job, "/x", {})
    assert resolved(job, "/x", {"TOKEN": "t", "OTHER": "o"}).environment == {"TOKEN": "t", "A": "1"}
    for backend in (SlurmBackend(Path("/s")), RayBackend(), KubernetesBackend()):
        with pytest.raises(ConfigError, match="as `resolved` returns it"):
            backend.build_request(job)
        with pytest.raises(ConfigError, match="null byte"):
            backend.build_request(resolved(JobFile(("p", "\0")), "/x", {}))


def test_where_slurm_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QueueError, match="sbatch not found: run this on a machine with Slurm's commands"):
        slurm = SlurmBackend(tmp_path)
        slurm.submit(slurm.build_request(a_job("slurm")))
    with pytest.raises(QueueError, match="expected the id of a Slurm job"):
        SlurmBackend(tmp_path).cancel("1; id")


def test_every_state_of_slurm_is_known() -> None:
    """The job states that squeue's manual lists (24.11)."""
    listed = (
        "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED RUNNING "
        "RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING "
        "SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT"
    )
    assert set(listed.split()) <= set(STATES)


OWN = ("--nodes=2", "--host=h:7", "--node-rank=1")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("evenload", "run", "t.py"), ("evenload", "run", *OWN, "t.py")),
        (("/x/evenload", "run", "-d", "cpu", "t.py"), ("/x/evenload", "run", *OWN, "-d", "cpu", "t.py")),
        (("py", "-m", "evenload.cli.main", "run", "t.py"), ("py", "-m", "evenload.cli.main", "run", *OWN, "t.py")),
        (("evenload", "run", "--nodes=2", "--host", "x", "t.py"), None),
        (("evenload", "doctor"), None),
        (("python", "run", "t.py"), None),
    ],
)
def test_a_command_on_several_nodes(command: tuple[str, ...], expected: tuple[str, ...] | None) -> None:
    node = NodeContext(2, 1, "h", 7)
    variables = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
    assert command_on_node(command, node) == ((expected, {}) if expected else (command, variables))
    assert command_on_node(command, NodeContext(1, 0, "h", 7)) == (command, {})
