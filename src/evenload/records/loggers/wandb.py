"""Weights & Biases logger: one W&B run per run folder, also over several sessions, online or offline."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.logger import LoggerContext, StepScalars
from evenload.records.loggers.wandb_files import newest_step_in
from evenload.records.media import HISTOGRAM, IMAGE, TABLE, read_histogram, read_table

INIT_TIMEOUT_S = 20.0


class WeightsAndBiases:
    """A separate W&B run, independent of those that the script opens.

    W&B accepts steps in increasing order only, so steps repeated after a resume are left out and keep their first
    values. Options that are not set follow W&B's own settings (``wandb login``, its variables, its settings file).
    """

    accepts_rewrites = False

    def __init__(self, context: LoggerContext) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._folder = context.folder
        arguments: dict[str, Any] = {**context.options, "reinit": "create_new", "allow_val_change": True}
        try:
            own = self._wandb.setup().settings
            if own.init_timeout > INIT_TIMEOUT_S:  # retries follow, and an exit waits for it
                arguments["settings"] = {"init_timeout": INIT_TIMEOUT_S}
            if context.run_id:
                arguments |= {"id": context.run_id, "resume": "allow"}
            elif "name" not in arguments and own.run_name is None:
                arguments["name"] = context.folder.name
            self._run: Any = self._wandb.init(config=dict(context.settings), **arguments)
        except (self._wandb.errors.UsageError, self._wandb.errors.AuthenticationError, ValueError) as error:
            raise ConfigError(
                f"W&B cannot open a run: {str(error).rstrip('.')}; run `wandb login`, or set the logger option "
                f"wandb.mode=offline, or remove the logger"
            ) from error
        self.run_id: str = self._run.id
        self.newest_step: int | None = -1
        if context.run_id:
            self._run.config.update(dict(context.settings), allow_val_change=True)
            # The next step comes from the W&B server if online, else from the files of earlier sessions.
            offline = bool(self._run.offline)
            self.newest_step = newest_step_in(self._earlier_files()) if offline else self._run.step - 1

    @property
    def raw(self) -> Any:
        """The W&B run: what ``wandb.init`` returns."""
        return self._run

    def write(self, batch: Sequence[StepScalars]) -> None:
        for row in batch:
            shown = {name: self._shown(self._folder / file) for name, file in row.media.items()}
            self._run.log({**row.scalars, **shown}, step=row.step)

    def _shown(self, path: Path) -> Any:
        """Return W&B's own object for a file of `records.media`."""
        if path.name.endswith(IMAGE):
            return self._wandb.Image(str(path))
        if path.name.endswith(HISTOGRAM):
            return self._wandb.Histogram(np_histogram=read_histogram(path))
        columns, rows = read_table(path) if path.name.endswith(TABLE) else (["text"], [[path.read_text()]])
        return self._wandb.Table(columns=columns, data=rows)

    def close(self, succeeded: bool) -> None:
        """Finish the W&B run; wait until everything is uploaded, or on disk if offline."""
        self._run.finish(exit_code=0 if succeeded else 1)

    def drop(self, for_good: bool) -> None:
        """Finish the run, or tear down the W&B process, which may be dead and would break any later run in this process.

        With ``for_good`` the W&B process is killed: it would block the exit until its server answers.
        """
        if for_good:
            _kill_service()
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


def _kill_service() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
