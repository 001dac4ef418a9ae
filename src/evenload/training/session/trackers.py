"""The objects that `run.tracker` returns: of a logger's library, of TensorBoard, or nothing on a rank that does not write."""

from __future__ import annotations

import importlib
from typing import Any

from evenload.errors import ConfigError
from evenload.records.loggers.tensorboard import TensorBoard
from evenload.training.step.context import TrainingContext


class IgnoredCalls:
    """Accepts any call and attribute, and does nothing: the tracker of a rank that does not write."""

    def __getattr__(self, name: str) -> IgnoredCalls:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> IgnoredCalls:
        return self

    def __enter__(self) -> IgnoredCalls:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Any:
        return iter((self, self))  # client, run_id = run.tracker("mlflow")


class _EventFile:
    """The part of torch's event writer that its `FileWriter` calls, over the file of the logger."""

    def __init__(self, logger: TensorBoard) -> None:
        self._logger = logger

    def get_logdir(self) -> str:
        return str(self._logger.folder)

    def add_event(self, event: Any) -> None:
        self._logger.add_event(event)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def reopen(self) -> None: ...


def open_tracker(name: str, context: TrainingContext) -> Any:
    """Return the own object of a logger's library; see `Run.tracker`. ConfigError if the run has no such logger."""
    if name not in context.config.loggers:
        have = ", ".join(context.config.loggers) or "none"
        raise ConfigError(f"run.tracker({name!r}): the loggers of this run are: {have}; add it: init(loggers={name!r})")
    raw = context.recorder.tracker(name)
    if raw is None:
        return IgnoredCalls()
    return _summary_writer(raw) if isinstance(raw, TensorBoard) else raw


def _summary_writer(logger: TensorBoard) -> Any:
    """Return torch's SummaryWriter, which writes into the event file of the logger."""
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard.writer")
    file_writer = tensorboard.FileWriter.__new__(tensorboard.FileWriter)
    file_writer.event_writer = _EventFile(logger)

    class EventFileWriter(tensorboard.SummaryWriter):  # type: ignore[misc]
        def _get_file_writer(self) -> Any:
            self.all_writers: Any = {str(logger.folder): file_writer}
            self.file_writer: Any = file_writer
            return file_writer

    return EventFileWriter(str(logger.folder))
