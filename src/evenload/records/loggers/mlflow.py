"""MLflow logger: one MLflow run per run folder, also over several sessions."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from evenload.errors import ConfigError
from evenload.records.loggers.logger import LoggerContext, RefusedError, StepScalars
from evenload.records.loggers.scalars import STEP

MAX_METRICS, MAX_PARAMS = 1000, 100
"""Per request; https://mlflow.org/docs/latest/rest-api.html#log-batch"""
MAX_VALUE_LENGTH = 500
PERMANENT_ERRORS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Error codes for which a retry fails again."""


class MLflowRun(NamedTuple):
    """MLflow's client, and the id of this run, which its methods take."""

    client: Any
    run_id: str


class MLflow:
    """An MLflow run with a separate client, independent of the script's own use of MLflow.

    MLflow stores a repeated metric twice, so steps repeated after a resume are left out and keep their first values.
    Options that are not set follow MLflow's own settings (MLFLOW_TRACKING_URI and others).
    """

    accepts_rewrites = False

    def __init__(self, context: LoggerContext) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._folder = context.folder
        options = context.options
        try:
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=options.get("tracking_uri"))
            if context.run_id:
                run = self._client.get_run(context.run_id)
                if run.info.lifecycle_stage != "active":
                    raise ConfigError(f"the MLflow run {context.run_id} was deleted; {_restart_hint(context)}")
                self._client.update_run(context.run_id, status="RUNNING")
            else:
                experiment = self._experiment(options.get("experiment"))
                tags = {tag.partition("=")[0]: tag.partition("=")[2] for tag in options.get("tags", ())}
                run = self._client.create_run(experiment, tags=tags, run_name=options.get("name", context.folder.name))
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise ConfigError(f"MLflow has no run {context.run_id}: {error}; {_restart_hint(context)}") from error
            if error.error_code in PERMANENT_ERRORS:
                raise ConfigError(
                    f"MLflow cannot open a run: {error}; correct logger_options, or remove the logger"
                ) from error
            raise
        self.run_id: str = run.info.run_id
        self.newest_step: int | None = int(run.data.metrics.get(STEP, -1))
        self._log_settings(context.settings, run.data.params)

    @property
    def raw(self) -> MLflowRun:
        return MLflowRun(self._client, self.run_id)

    def write(self, batch: Sequence[StepScalars]) -> None:
        metrics = [
            self._entities.Metric(metric_name(name), float(value), int(row.time * 1000), row.step)
            for row in batch
            for name, value in row.scalars.items()
        ]
        try:
            for first in range(0, len(metrics), MAX_METRICS):
                self._client.log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS])
        except self._mlflow.MlflowException as error:
            if error.error_code in PERMANENT_ERRORS:
                raise RefusedError(str(error)) from error
            raise
        for row in batch:
            for name, file in row.media.items():
                self._client.log_artifact(self.run_id, str(self._folder / file), f"media/{metric_name(name)}")

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self.run_id, status="FINISHED" if succeeded else "FAILED")

    def drop(self, for_good: bool) -> None:
        """Release nothing."""

    def _experiment(self, name: str | None) -> str:
        own: Any = importlib.import_module("mlflow.environment_variables")
        if name is None and own.MLFLOW_EXPERIMENT_ID.get():
            return str(own.MLFLOW_EXPERIMENT_ID.get())
        name = name or own.MLFLOW_EXPERIMENT_NAME.get() or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _log_settings(self, settings: Mapping[str, Any], there: Mapping[str, str]) -> None:
        """Log the settings as parameters; MLflow parameters are immutable, so those of the first session stay."""
        params = [
            self._entities.Param(key, str(value)[:MAX_VALUE_LENGTH] or "-")
            for key, value in settings.items()
            if key not in there
        ]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + MAX_PARAMS])


def metric_name(name: str) -> str:
    """Convert a name to MLflow's rules: letters, digits, ``_ - . : /`` and spaces, and no empty part of a path."""
    parts = re.sub(r"[^\w.\-/ :]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip(". ")) or "_"


def _restart_hint(context: LoggerContext) -> str:
    return (
        f"remove {context.folder / 'loggers' / 'mlflow.json'} to start a new run with all steps, or remove the logger"
    )
