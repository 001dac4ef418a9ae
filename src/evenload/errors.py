"""Every error that Evenload raises, in one tree.

EvenloadError
├── ConfigError          a setting is wrong, unknown, without effect, or given twice (also a ValueError)
├── DataError            the dataset or the loader can't be used as asked
├── StepError            `step.backward` and the loop around it are used in a way that would be wrong
│   └── NonFiniteError   the loss or the gradient stayed NaN or infinite
├── CheckpointError      a checkpoint can't be written, read, or doesn't fit
├── LaunchError          the ranks can't be started, or don't come together
├── DesyncError          the ranks of a job do different things (one left the loop, one goes on)
│   └── DivergenceError  the ranks no longer hold the same parameters or buffers
├── QueueError           the queue of jobs is asked for what can't be, or its record doesn't hold together
│   └── StaleError       a runner or writer speaks whose time is over: another has taken its place
├── RankFailedError      a rank ended with an error; the launcher tells its story once
└── PeerLostError        another rank is gone; a consequence, never the cause

An error says what was set, what was found, and what to do.
"""

from __future__ import annotations


class EvenloadError(Exception):
    """The root: `except EvenloadError` catches all that Evenload raises on purpose."""


class ConfigError(EvenloadError, ValueError):
    """A setting is wrong, unknown, without effect, or given twice."""


class DataError(EvenloadError):
    """The dataset or the loader can't be used as asked."""


class StepError(EvenloadError, RuntimeError):
    """`step.backward` and the loop around it are used in a way that would give a wrong result."""


class NonFiniteError(StepError):
    """The loss or the gradient stayed NaN or infinite for several steps."""


class CheckpointError(EvenloadError):
    """A checkpoint can't be written or read, or doesn't fit what the script registers."""


class LaunchError(EvenloadError):
    """The ranks can't be started, or don't come together."""


class DesyncError(EvenloadError, RuntimeError):
    """The ranks of one job do different things at the same time."""


class DivergenceError(DesyncError):
    """The ranks no longer hold the same parameters or buffers."""


class QueueError(EvenloadError):
    """The queue of jobs is asked for what can't be, or its record of events doesn't hold together."""


class StaleError(QueueError):
    """A runner or a writer of the queue speaks whose time is over: another has taken its place."""


class RankFailedError(EvenloadError):
    """A rank ended with an error of its own; raised where ranks are started from Python."""


class PeerLostError(EvenloadError):
    """Another rank is gone. A consequence: the launcher looks for the cause elsewhere."""
