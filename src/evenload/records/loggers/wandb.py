"""Weights & Biases, by its own library: one W&B run for a run folder, also over several sittings, online or offline."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.logger import Opening, Point
from evenload.records.loggers.wandb_files import newest_step_in

INIT_TIMEOUT_S = 20.0


class WeightsAndBiases:
    """A W&B run of its own, beside those that the script may have open.

    W&B takes the steps of a run in rising order alone, so a step that is done again after a resume keeps its first values.
    What is not set for this logger is what W&B's own settings say (``wandb login``, its variables, its settings file).
    """

    takes_again = False

    def __init__(self, opening: Opening) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        arguments: dict[str, Any] = {**opening.options, "reinit": "create_new", "allow_val_change": True}
        try:
            own = self._wandb.setup().settings
            if own.init_timeout > INIT_TIMEOUT_S:  # it is tried again, and an exit waits for it
                arguments["settings"] = {"init_timeout": INIT_TIMEOUT_S}
            if opening.run_id:
                arguments |= {"id": opening.run_id, "resume": "allow"}
            elif "name" not in arguments and own.run_name is None:
                arguments["name"] = opening.folder.name
            self._run: Any = self._wandb.init(config=dict(opening.settings), **arguments)
        except (self._wandb.errors.UsageError, self._wandb.errors.AuthenticationError, ValueError) as error:
            raise ConfigError(
                f"W&B doesn't open a run: {error}; `wandb login`, or set logger_options to wandb.mode=offline, or leave the "
                f"logger out"
            ) from error
        self.run_id: str = self._run.id
        self.newest_step: int | None = -1
        if opening.run_id:
            self._run.config.update(dict(opening.settings), allow_val_change=True)
            # Online W&B's server says where it goes on; offline the files of earlier sittings do.
            offline = bool(self._run.offline)
            self.newest_step = newest_step_in(self._earlier_files()) if offline else self._run.step - 1

    def write(self, points: Sequence[Point]) -> None:
        """Hands the points to W&B's own process, which writes and uploads them."""
        for point in points:
            self._run.log(dict(point.scalars), step=point.step)

    def close(self, ended_well: bool) -> None:
        """Ends the W&B run; waits until everything is uploaded, or on the disk where it is offline."""
        self._run.finish(exit_code=0 if ended_well else 1)

    def drop(self, for_good: bool) -> None:
        """After a fault W&B's own process may be gone, which no later run in this process would survive by itself.

        For good, it is ended: it would keep this process waiting until W&B's server answers, however long that takes.
        """
        if for_good:
            _end_service()
            return
        try:
            self._run.finish(exit_code=1)
        except Exception:
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)

    def _earlier_files(self) -> list[Path]:
        here = Path(self._run.settings.sync_dir)
        return [
            path
            for path in here.parent.glob(f"offline-run-*-{self.run_id}*/run-{self.run_id}.wandb")
            if path.parent != here
        ]


def _end_service() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
