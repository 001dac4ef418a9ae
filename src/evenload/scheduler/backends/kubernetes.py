"""The backend `kubernetes`: write a job file as a JobSet for a queue of Kueue, to be sent with `kubectl`.

A program that is stopped (preempted by Kueue, or its node drained) receives SIGTERM, saves within the grace period and exits
with code 75, which restarts the gang without counting; any other code counts as a failure. Nothing is sent from here,
because `kubectl` already has the cluster's credentials.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from evenload.errors import ConfigError, QueueError
from evenload.job import EXIT_CODE
from evenload.scheduler.backends.interface import (
    BackendRequest,
    JobStatus,
    SchedulerBackend,
    check_options,
    check_resolved,
)
from evenload.scheduler.backends.node_command import NodeContext, command_on_node
from evenload.scheduler.job_file import JobFile

OPTIONS = {
    "image": "container image with the program and Evenload",
    "queue": "Kueue's LocalQueue; default: default",
    "priority_class": "Kueue's WorkloadPriorityClass",
    "namespace": "namespace to run in",
    "gpu": "name of the GPU resource; default: nvidia.com/gpu",
    "gpu_label": "node label with the kind of GPU; default: nvidia.com/gpu.product",
    "claim": "CLAIM:PATH, a persistent volume for checkpoints",
    "memory": "memory of each node's container, such as 64Gi",
}
"""Keys of a job file's `[kubernetes]` table."""

_CPU = "cpu"
_PORT = 29500
_GROUP = "nodes"
_SHUT_DOWN_S = 5
"""Time between the end of the grace period and SIGKILL."""
_RANK = "$(JOB_COMPLETION_INDEX)"
"""Kubernetes replaces this by the index of the pod."""


class KubernetesBackend(SchedulerBackend):
    """Writes manifests; submits nothing."""

    name = "kubernetes"

    def build_request(self, job: JobFile, snapshot: str = "") -> BackendRequest:
        """Build a JobSet, or one for each element of an array."""
        check_resolved(job)
        options = job.options.get("kubernetes", {})
        check_options("kubernetes", options, OPTIONS)
        _check_possible(job)
        documents = ["".join(f"{line}\n" for line in _yaml(_job_set(job, index))) for index in job.indices()]
        head = "# Written by `evenload submit --backend kubernetes`; submit it with `kubectl create -f FILE`.\n"
        return BackendRequest(
            "kubernetes", _name(job, None), head + "---\n".join(documents), ("kubectl", "create", "-f", "-")
        )

    def submit(self, request: BackendRequest) -> tuple[str, ...]:
        self._refuse("evenload submit --backend kubernetes --dry-run job.toml | kubectl create -f -")

    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        self._refuse("kubectl get jobset,workload")

    def cancel(self, job: str, *, now: bool = False) -> None:
        self._refuse(f"kubectl delete jobset {job}")

    def logs(self, job: str) -> Path:
        self._refuse(f"kubectl logs --selector jobset.sigs.k8s.io/jobset-name={job}")

    @staticmethod
    def _refuse(instead: str) -> NoReturn:
        raise QueueError(f"Evenload only writes jobs for Kubernetes; use kubectl instead: {instead}")


BACKEND = KubernetesBackend()


def _check_possible(job: JobFile) -> None:
    options = job.options.get("kubernetes", {})
    if "image" not in options:
        raise ConfigError('Kubernetes needs an image with the program: set [kubernetes] image = "..."')
    if job.priority and "priority_class" not in options:
        raise ConfigError(
            f"priority = {job.priority}: Kueue has named priority classes; set [kubernetes] priority_class = ..."
        )
    if job.after:
        raise ConfigError("after: Kueue can't start a job after another; submit it when that one has ended")
    if job.soft_limit_s is not None:
        raise ConfigError("a soft time limit: Kubernetes has only a hard one; set it alone, such as time = ':3h'")
    if job.share_device or job.notify:
        raise ConfigError(f"{'share_device' if job.share_device else 'notify'}: has no effect on Kubernetes; remove it")
    if len(job.kinds) > 1:
        raise ConfigError(f"kind = {', '.join(job.kinds)}: a pod can select only one kind; set one kind")
    if job.memory_bytes and job.kinds != (_CPU,):
        raise ConfigError("memory: Kubernetes does not know the memory of a GPU; set the kind of GPU")
    if "claim" in options and not re.fullmatch(r"[a-z0-9.-]+:/.+", options["claim"]):
        raise ConfigError(f"[kubernetes] claim = {options['claim']!r}: expected CLAIM:PATH, such as checkpoints:/data")


def _name(job: JobFile, index: int | None) -> str:
    """A valid name: a DNS label, short enough for the suffixes that are appended."""
    base = re.sub(r"[^a-z0-9-]+", "-", (job.name or Path(job.command[0]).name).lower()).strip("-")[:40] or "job"
    return base if index is None else f"{base}-{index}"


def _job_set(job: JobFile, index: int | None) -> dict[str, Any]:
    options, nodes, name = job.options.get("kubernetes", {}), job.nodes or 1, _name(job, index)
    labels = {"kueue.x-k8s.io/queue-name": options.get("queue", "default")}
    if "priority_class" in options:
        labels["kueue.x-k8s.io/priority-class"] = options["priority_class"]
    counted = "RestartJobSet" if job.retries else "FailJobSet"
    template: dict[str, Any] = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "program", "operator": "NotIn", "values": [EXIT_CODE]},
                },
            ]
        },
        "template": {"spec": _pod(job, index, name)},
    }
    if job.hard_limit_s is not None:
        template["activeDeadlineSeconds"] = math.ceil(job.hard_limit_s)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            **({"namespace": options["namespace"]} if "namespace" in options else {}),
            "labels": labels,
        },
        "spec": {
            "suspend": True,
            "failurePolicy": {
                "maxRestarts": job.retries,
                "rules": [
                    {"name": "failed", "action": counted, "onJobFailureReasons": ["PodFailurePolicy"]},
                    {"name": "overTime", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
                    {
                        "name": "savedOrMoved",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["BackoffLimitExceeded"],
                    },
                ],
            },
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": template}}],
        },
    }


def _pod(job: JobFile, index: int | None, name: str) -> dict[str, Any]:
    options, nodes = job.options.get("kubernetes", {}), job.nodes or 1
    per_node, is_cpu = job.min_devices // nodes, job.kinds == (_CPU,)
    node = NodeContext(nodes, 0, f"{name}-{_GROUP}-0-0.{name}", _PORT)
    command, variables = command_on_node([word.replace("$", "$$") for word in job.command_of(index)], node)
    if nodes > 1:
        command = tuple(f"--node-rank={_RANK}" if word == "--node-rank=0" else word for word in command)
        variables = {key: _RANK if key == "NODE_RANK" else value for key, value in variables.items()}
    environment = {key: value.replace("$", "$$") for key, value in job.environment_of(index).items()} | variables
    limits: dict[str, Any] = {_CPU if is_cpu else options.get("gpu", "nvidia.com/gpu"): per_node}
    if "memory" in options:
        limits["memory"] = options["memory"]
    elif is_cpu and job.memory_bytes:
        limits["memory"] = per_node * job.memory_bytes
    claim, _, path = options.get("claim", "").partition(":")
    container: dict[str, Any] = {
        "name": "program",
        "image": options["image"],
        "workingDir": job.folder,
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"limits": limits},
    }
    if claim:
        container["volumeMounts"] = [{"name": "kept", "mountPath": path}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_s) + _SHUT_DOWN_S,
        "containers": [container],
    }
    if claim:
        pod["volumes"] = [{"name": "kept", "persistentVolumeClaim": {"claimName": claim}}]
    if job.kinds and not is_cpu:
        pod["nodeSelector"] = {options.get("gpu_label", "nvidia.com/gpu.product"): job.kinds[0]}
    return pod


def _yaml(value: dict[str, Any], indent: int = 0) -> list[str]:
    """Block style, with strings quoted as in JSON, which is valid YAML."""
    space, lines = "  " * indent, []
    for key, part in value.items():
        head = f"{space}{key if re.fullmatch(r'[A-Za-z][A-Za-z0-9./-]*', key) else json.dumps(key)}:"
        if isinstance(part, dict) and part:
            lines += [head, *_yaml(part, indent + 1)]
        elif isinstance(part, list) and part and isinstance(part[0], dict):
            lines.append(head)
            for element in part:
                first, *rest = _yaml(element, indent + 2)
                lines += [f"{space}  - {first.strip()}", *rest]
        else:
            lines.append(f"{head} {json.dumps(part)}")
    return lines
