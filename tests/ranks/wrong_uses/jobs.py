"""What the wrong uses are made of: a small job, and ways to run a wrong one and to catch what it tells."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError
from evenload.testing import run_ranks
from tests.warm import Command

PROMPT_S = 45.0
"""Ten times what an end takes on an idle machine, far less than the time limits inside (600 s where none is set)."""


def dataset(num_samples=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Job:
    """A model, a loader of global batches of 16, and an optimizer, prepared."""

    def __init__(self, run, *, model=None, data=None, **loader):
        self.run = run
        self.bare = nn.Linear(4, 1) if model is None else model
        self.data = dataset() if data is None else data
        self.model, self.loader = run.prepare(self.bare, DataLoader(self.data, **{"batch_size": 16, **loader}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, batch):
        x, y = batch
        return functional.mse_loss(self.model(x), y)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, step, loss_fn=None):
        loss = step.backward(loss_fn or self.loss)
        self.update()
        return loss

    def train(self, loss_fn=None):
        """One epoch; the losses."""
        return [float(self.step(step, loss_fn)) for step in self.loader]


def _tell(body, folder, settings):
    """Runs on each rank: what `body` raised of ours, as a text, or what it returned."""
    try:
        run = evenload.init(**{"project_dir": folder, "timeout_s": 60.0, **settings})
        returned = body(run)
        run.close()
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return returned


def told_by_ranks(body, folder, *, num_ranks=2, **settings):
    """What each rank is told when all of them run ``body(run)``, a function at the top of a module."""
    return run_ranks(_tell, num_ranks, body, str(folder / "run"), settings, timeout_s=PROMPT_S)


@dataclass(frozen=True)
class Ended:
    """How a command of a user's ended."""

    code: int
    stdout: str
    stderr: str


IMPORTS = """
import os, signal, sys, threading, time
import torch, evenload
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
"""

SCRIPT = (
    IMPORTS
    + """
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {getitem}
        return torch.full((4,), index / 64), torch.ones(1)

{before}
run = evenload.init(project_dir="run"{settings})
model = torch.nn.Linear(4, 1)
model, loader = run.prepare(model, DataLoader(Rows(), batch_size=16{loader}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{prepared}

def loss_fn(batch):
    x, y = batch
    {loss}
    return functional.mse_loss(model(x), y)

for epoch in range(2):
    for step in loader:
        {begin}
        loss = step.backward(loss_fn)
        optimizer.step(); optimizer.zero_grad()
        {end}
print("done", run.rank, flush=True)
"""
)


def script(*, settings="", loader="", **pieces):
    """A whole training script with a wrong line in one of its places."""
    text = SCRIPT.replace("{settings}", settings).replace("{loader}", loader)
    for name in ("before", "getitem", "prepared", "loss", "begin", "end"):
        indent = next(line for line in text.splitlines() if f"{{{name}}}" in line).split("{")[0]
        piece = textwrap.dedent(pieces.pop(name, "pass")).strip()
        text = text.replace(indent + f"{{{name}}}", textwrap.indent(piece, indent))
    assert not pieces, f"SCRIPT has no place {list(pieces)}"
    return text


def evenload_run(folder, text, *options, within_s=PROMPT_S, warm=True):
    """``evenload run OPTIONS train.py`` with this text; asserts that it ends in time and leaves no process.

    `warm`: forked from a server (tests/warm.py), else by an interpreter that starts others.
    """
    if text is not None:
        (folder / "train.py").write_text(text)
        options = (*options, "train.py")
    return command(folder, "-m", "evenload.cli.main", "run", *options, within_s=within_s, warm=warm)


def command(folder, *arguments, within_s=PROMPT_S, warm=False, **variables):
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    with (
        Command(arguments, folder, environment)
        if warm
        else subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert not (left := _left_by(folder)), f"{left} live on"
    assert not list(Path(folder).glob("evenload-*")), "the launch folder is left"
    return Ended(process.returncode, stdout, stderr)


def _left_by(folder):
    """The processes in the folder, or with it in their environment, after a moment for those about to end."""
    deadline = time.monotonic() + 2.0
    while found := [process.cmdline() for process in psutil.process_iter() if _belongs(process, str(folder))]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.05)
    return []


def _belongs(process, folder):
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.cwd() == folder or process.environ().get("TMPDIR") == folder
    except (psutil.Error, OSError):
        return False
