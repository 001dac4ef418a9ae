"""Other places for metrics, by their own libraries: TensorBoard, Weights & Biases, MLflow, others by entry point.

The records of the run are the truth, and the queue: a feeder reads `steps.jsonl` and brings it to a logger, in a thread of
its own. Training never waits for a logger; one that fails is tried again, also in the next sitting, from where it stopped.

`logger` says what a logger is, `catalogue` which there are, `points` what a step looks like to them, `feeder` brings it.
Evenload's own figures get names of their own; ``loss`` is written once, the user's where they log it.
"""

from evenload.records.loggers.logger import Logger as Logger
from evenload.records.loggers.logger import Opening as Opening
from evenload.records.loggers.logger import Point as Point
from evenload.records.loggers.logger import RefusedError as RefusedError
