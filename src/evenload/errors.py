"""All errors that Evenload raises, in one tree.

EvenloadError
├── ConfigError          a setting is wrong, unknown, without effect, or given twice (also a ValueError)
├── UnknownNameError     an object of Evenload has no attribute of this name (also an AttributeError)
├── DataError            the dataset or the loader can't be used
├── StepError            `step.backward` or the training loop is used in a way that would be wrong
│   └── NonFiniteError   the loss or the gradient stayed NaN or infinite
├── CheckpointError      a checkpoint can't be written or read, or does not match
│   ├── DamagedError     a file of a checkpoint is missing, torn or changed
│   └── UnwritableError  the disk does not take a checkpoint now: no room, no permission, an error
├── LaunchError          the ranks can't be started, or their rendezvous fails
├── DesyncError          the ranks of a run do different things (one has left the loop, another has not)
│   └── DivergenceError  the ranks no longer hold the same parameters or buffers
├── QueueError           a request to the queue is invalid, or its log is inconsistent
│   └── StaleError       a message from a runner or writer that has been replaced
├── RankFailedError      a rank ended with an error, which the launcher reports once
└── PeerLostError        another rank is gone: a consequence, never the cause

An error says what was set, what was found, and what to do.
"""

from __future__ import annotations


class EvenloadError(Exception):
    """Root of all errors that Evenload raises on purpose."""


class ConfigError(EvenloadError, ValueError):
    """A setting is wrong, unknown, without effect, or given twice."""


class UnknownNameError(EvenloadError, AttributeError):
    """An object of Evenload has no attribute of this name."""


class DataError(EvenloadError):
    """The dataset or the loader can't be used."""


class StepError(EvenloadError, RuntimeError):
    """`step.backward` or the training loop is used in a way that would give a wrong result."""


class NonFiniteError(StepError):
    """The loss or the gradient was NaN or infinite for several steps."""


class CheckpointError(EvenloadError):
    """A checkpoint can't be written or read, or does not match the objects that the script registers."""

    def __init__(self, message: str = "", *, elsewhere: bool = False) -> None:
        """`elsewhere`: it failed on another rank, which says why."""
        super().__init__(message)
        self.elsewhere = elsewhere


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, torn or changed."""


class UnwritableError(CheckpointError):
    """The disk does not take a checkpoint now; the next attempt may succeed."""


class LaunchError(EvenloadError):
    """The ranks can't be started, or their rendezvous fails."""


class DesyncError(EvenloadError, RuntimeError):
    """The ranks of one run do different things at the same time."""


class DivergenceError(DesyncError):
    """The ranks no longer hold the same parameters or buffers."""


class QueueError(EvenloadError):
    """A request to the queue is invalid, or its event log is inconsistent."""


class StaleError(QueueError):
    """A message from a runner or writer of the queue that has been replaced by another."""


class RankFailedError(EvenloadError):
    """A rank ended with an error; raised where ranks are started from Python."""


class PeerLostError(EvenloadError):
    """Another rank is gone. This is a consequence: the launcher looks for the cause on other ranks."""

    restarts_all = False
    """True if no rank that is left can go on without it, and all start again from the newest checkpoint."""
