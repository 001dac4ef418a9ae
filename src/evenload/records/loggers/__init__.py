"""Loggers that forward metrics through their own libraries: TensorBoard, Weights & Biases, MLflow, or by entry point.

The records of the run are the queue: a thread reads `steps.jsonl` and sends it to a logger. Training never waits for a
logger. After a failure the thread retries from the same position, also in the next session.

`logger` defines the interface, `catalogue` lists the loggers, `scalars` converts records to scalars per step,
`logger_thread` sends them. Metrics of Evenload have names of their own; ``loss`` is written once, the user's if logged.
"""

from evenload.records.loggers.logger import Logger as Logger
from evenload.records.loggers.logger import LoggerContext as LoggerContext
from evenload.records.loggers.logger import RefusedError as RefusedError
from evenload.records.loggers.logger import StepScalars as StepScalars
