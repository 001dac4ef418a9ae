"""``evenload export``: write the weights of a run's checkpoint to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (project_dir), or one checkpoint's folder.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write: .safetensors, or any other name for torch.save.")
    ],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="last|best|STEP", help="Checkpoint whose weights are written.")
    ] = "last",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the state in run.resume(NAME=...); model, or the only one."),
    ] = None,
) -> None:
    """Write the weights of a checkpoint to one file, for inference or another program."""
    from evenload.training.checkpoint.export import export_checkpoint

    chosen = export_checkpoint(run, out, checkpoint, name)
    print(f"evenload: wrote {chosen} of {run} ({checkpoint}) to {out}")
