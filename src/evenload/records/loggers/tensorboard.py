"""TensorBoard logger: event files in ``<run folder>/tensorboard``, without torch."""

from __future__ import annotations

import importlib
import io
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenload.records.loggers.logger import LoggerContext, StepScalars
from evenload.records.media import HISTOGRAM, IMAGE, TABLE, Histogram, read_histogram, read_table, size_of_png


class TensorBoard:
    """One event file per session; each batch is a single write, so that a full disk leaves no partial event.

    Before repeated steps a session start is written, which makes TensorBoard discard their earlier values.
    """

    accepts_rewrites = True

    def __init__(self, context: LoggerContext) -> None:
        self._event_pb: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._record_writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self.run_id = ""
        self.newest_step: int | None = None
        self._run_folder = context.folder
        target = context.folder / "tensorboard"
        target.mkdir(parents=True, exist_ok=True)
        num_earlier = len(list(target.glob("events.out.tfevents.*")))
        now = time.time()
        first = [self._event_pb.Event(wall_time=now, file_version="brain.Event:2")]
        if context.settings:
            summary = _hyperparameters(context.settings, str(context.folder), now)
            first.append(self._event_pb.Event(wall_time=now, summary=summary))
        # TensorBoard reads the files of a folder in the order of their names, which start with whole seconds.
        path = target / f"events.out.tfevents.{int(now):010d}.evenload.{num_earlier:04d}"
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self._lock = threading.Lock()
        self.folder = target
        self._append(first)

    def write(self, batch: Sequence[StepScalars]) -> None:
        events = []
        for row in batch:
            if row.replaces:
                start = self._event_pb.SessionLog(status=self._event_pb.SessionLog.START)
                events.append(self._event_pb.Event(wall_time=row.time, step=row.step, session_log=start))
            values = [self._summary_pb.Summary.Value(tag=tag, simple_value=value) for tag, value in row.scalars.items()]
            values += [self._shown(name, self._run_folder / file) for name, file in row.media.items()]
            summary = self._summary_pb.Summary(value=values)
            events.append(self._event_pb.Event(wall_time=row.time, step=row.step, summary=summary))
        self._append(events)

    def _shown(self, tag: str, path: Path) -> Any:
        """Return the value of a summary for a file of `records.media`; a table is a text in Markdown."""
        summary: Any = self._summary_pb.Summary
        if path.name.endswith(IMAGE):
            data = path.read_bytes()
            width, height, channels = size_of_png(data)
            image = summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=data)
            return summary.Value(tag=tag, image=image)
        if path.name.endswith(HISTOGRAM):
            return summary.Value(tag=tag, histo=self._histogram(read_histogram(path)))
        text = _markdown(*read_table(path)) if path.name.endswith(TABLE) else path.read_text()
        tensor_pb: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        types_pb: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
        shape_pb: Any = importlib.import_module("tensorboard.compat.proto.tensor_shape_pb2")
        shape = shape_pb.TensorShapeProto(dim=[shape_pb.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb.TensorProto(dtype=types_pb.DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        data_class = self._summary_pb.DATA_CLASS_TENSOR
        plugin = self._summary_pb.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summary_pb.SummaryMetadata(plugin_data=plugin, data_class=data_class)
        return summary.Value(tag=tag, tensor=tensor, metadata=metadata)

    def _histogram(self, found: Histogram) -> Any:
        # The moments are those of the middles of the bins.
        middles = [(low + high) / 2 for low, high in itertools.pairwise(found.edges)]
        pairs = list(zip(found.counts, middles, strict=True))
        moments = {
            "num": sum(found.counts),
            "sum": sum(count * middle for count, middle in pairs),
            "sum_squares": sum(count * middle**2 for count, middle in pairs),
        }
        edges = {"min": found.edges[0], "max": found.edges[-1], "bucket_limit": found.edges[1:]}
        return self._summary_pb.HistogramProto(bucket=found.counts, **edges, **moments)

    def close(self, succeeded: bool) -> None:
        self._file.close()

    def drop(self, for_good: bool) -> None:
        """Close the event file; the next one continues."""
        self._file.close()

    def add_event(self, event: Any) -> None:
        """Append an event of the script's own, from any thread."""
        self._append([event])

    def _append(self, events: Sequence[Any]) -> None:
        with self._lock:
            self._append_whole(events)

    def _append_whole(self, events: Sequence[Any]) -> None:
        buffer = io.BytesIO()
        writer = self._record_writer.RecordWriter(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        data = buffer.getvalue()
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            self._file.seek(self._size)
            self._file.truncate()
            raise
        self._size += len(data)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def _hyperparameters(settings: Mapping[str, Any], group: str, time_s: float) -> Any:
    hparams: Any = importlib.import_module("tensorboard.plugins.hparams.summary_v2")
    plain = {
        key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in settings.items()
    }
    return hparams.hparams_pb(plain, trial_id=group, start_time_secs=time_s)
