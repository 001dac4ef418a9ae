"""MLflow, by its own library: one MLflow run for a run folder, also over several sittings."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.logger import Opening, Point, RefusedError
from evenload.records.loggers.points import STEP

MOST_METRICS, MOST_PARAMS = 1000, 100
"""That a store takes at once; https://mlflow.org/docs/latest/rest-api.html#log-batch"""
LONGEST_VALUE = 500
PERMANENT = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Answers of a store that will be the same next time."""


class MLflow:
    """An MLflow run, spoken to by a client of its own, beside what the script may do with MLflow.

    A store takes a metric of a step as often as it is given, so a step that is done again after a resume keeps its first
    values. What is not set for this logger is what MLflow's own settings say (MLFLOW_TRACKING_URI and others).
    """

    takes_again = False

    def __init__(self, opening: Opening) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        options = opening.options
        try:
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=options.get("tracking_uri"))
            if opening.run_id:
                run = self._client.get_run(opening.run_id)
                if run.info.lifecycle_stage != "active":
                    raise ConfigError(f"MLflow's run {opening.run_id} was deleted; {_anew(opening)}")
                self._client.update_run(opening.run_id, status="RUNNING")
            else:
                experiment = self._experiment(options.get("experiment"))
                tags = {tag.partition("=")[0]: tag.partition("=")[2] for tag in options.get("tags", ())}
                run = self._client.create_run(experiment, tags=tags, run_name=options.get("name", opening.folder.name))
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise ConfigError(f"MLflow has no run {opening.run_id} there: {error}; {_anew(opening)}") from error
            if error.error_code in PERMANENT:
                raise ConfigError(
                    f"MLflow doesn't open a run: {error}; mend logger_options, or leave it out"
                ) from error
            raise
        self.run_id: str = run.info.run_id
        self.newest_step: int | None = int(run.data.metrics.get(STEP, -1))
        self._log_settings(opening.settings, run.data.params)

    def write(self, points: Sequence[Point]) -> None:
        """Sends the points, a thousand numbers at once."""
        metrics = [
            self._entities.Metric(metric_name(name), float(value), int(point.time * 1000), point.step)
            for point in points
            for name, value in point.scalars.items()
        ]
        try:
            for first in range(0, len(metrics), MOST_METRICS):
                self._client.log_batch(self.run_id, metrics=metrics[first : first + MOST_METRICS])
        except self._mlflow.MlflowException as error:
            if error.error_code in PERMANENT:
                raise RefusedError(str(error)) from error
            raise

    def close(self, ended_well: bool) -> None:
        """Says how the run ended."""
        self._client.set_terminated(self.run_id, status="FINISHED" if ended_well else "FAILED")

    def drop(self, for_good: bool) -> None:
        """There is nothing to let go of."""

    def _experiment(self, name: str | None) -> str:
        own: Any = importlib.import_module("mlflow.environment_variables")
        if name is None and own.MLFLOW_EXPERIMENT_ID.get():
            return str(own.MLFLOW_EXPERIMENT_ID.get())
        name = name or own.MLFLOW_EXPERIMENT_NAME.get() or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _log_settings(self, settings: Mapping[str, Any], there: Mapping[str, str]) -> None:
        """Gives the settings as parameters; a parameter can't change, so those of the first sitting stay."""
        params = [
            self._entities.Param(key, str(value)[:LONGEST_VALUE] or "-")
            for key, value in settings.items()
            if key not in there
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + MOST_PARAMS])


def metric_name(name: str) -> str:
    """A name as MLflow allows it: letters, digits, ``_ - . : /`` and spaces, and no empty part of a path."""
    parts = re.sub(r"[^\w.\-/ :]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip(". ")) or "_"


def _anew(opening: Opening) -> str:
    return f"remove {opening.folder / 'loggers' / 'mlflow.json'} to begin a new one with all steps, or leave the logger out"
