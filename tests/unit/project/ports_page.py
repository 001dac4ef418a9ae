"""The text of docs/ports.md: each port's commands and its diff, by ``python -m tests.unit.project.ports_page``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tests.paths import EXAMPLES

FOLDER = EXAMPLES / "ports"
_HEAD = """\
# Ports of three well-known scripts

`examples/ports` holds three training loops that many projects start from, each as the plain script and as the same script with
Evenload. They were written for this project after the structure of the originals, small enough for a CPU, on data that needs no
download. A test runs both forms, Evenload's on two ranks with uneven shares, and compares their losses.

This page is generated from the scripts by `python -m tests.unit.project.ports_page`; the counts are those of the diffs below.
"""


@dataclass(frozen=True)
class Port:
    name: str
    title: str
    about: str
    notes: tuple[str, ...]


PORTS = (
    Port(
        "text",
        "Text classification with transformers",
        "After `run_glue_no_trainer.py` of transformers: a tokenizer, batches padded to their longest text, AdamW "
        "with two groups of parameters, a scheduler with warm-up, gradient accumulation, accuracy after each "
        "epoch. The texts are functions of Python's standard library, the classes the modules they are from.",
        (
            "Gradient accumulation goes: `batch_size` becomes the product, and each device computes its share in as many "
            "micro-batches as its memory requires. The schedule needs no division either.",
            "The plain script divides every loss by `gradient_accumulation_steps`, so the last, short group of an epoch has too "
            "small a gradient. With Evenload it has the mean of its samples.",
            "`run.checkpoint` and `run.resume` replace the file per epoch, which the plain script writes and never reads.",
        ),
    ),
    Port(
        "image",
        "Image classification with DDP",
        "After torchvision's `references/classification/train.py`: functions for an epoch and an evaluation, DDP "
        "and its samplers, SyncBatchNorm, mixed precision with a GradScaler, label smoothing, warm-up and cosine "
        "schedule, an exponential moving average, resuming. The images are scikit-learn's digits.",
        (
            "Everything about ranks goes: the process group, the DDP wrapper and its `module`, both samplers, `set_epoch`, "
            "`all_reduce`.",
            "`DistributedSampler` repeats samples to fill the last round, which the plain evaluation counts twice. `run.batches` "
            "yields every sample once.",
            "The batch size is that of a step on all devices together. In the plain script it is that of each device, so the "
            "learning rate has to follow the number of devices.",
        ),
    ),
    Port(
        "gpt",
        "A GPT on random windows",
        "After the description of nanoGPT's loop: no DataLoader but random windows of a text, gradient "
        "accumulation, DDP that synchronizes at the last micro-batch only, a schedule by hand, a GradScaler, "
        "validation by rank 0 every few steps, and the best model.",
        (
            "`get_batch` becomes a dataset of all windows and a `RandomSampler` with replacement, which draws the same windows. "
            "Evenload has to know the samples of a step to split them.",
            "All ranks validate, each a part; in the plain script they wait for rank 0.",
            "A schedule by hand works as it stands: `step.index` counts the steps, also after a resume.",
        ),
    ),
)


def page() -> str:
    """Return the page."""
    return "\n".join((_HEAD, *(_section(port) for port in PORTS)))


def diff(name: str) -> str:
    """Return the diff from NAME_plain.py to NAME_evenload.py."""
    before, after = FOLDER / f"{name}_plain.py", FOLDER / f"{name}_evenload.py"
    old, new = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(old, new, before.name, after.name, n=2))


def changed_lines(diff_text: str) -> tuple[int, int]:
    """Return the numbers of lines that a diff adds and removes, without empty ones."""
    lines = [line for line in diff_text.splitlines() if line[1:].strip() and not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)


def _section(port: Port) -> str:
    added, removed = changed_lines(diff(port.name))
    lengths = [
        sum(1 for line in (FOLDER / f"{port.name}_{form}.py").read_text().splitlines() if line.strip())
        for form in ("plain", "evenload")
    ]
    notes = "".join(f"- {note}\n" for note in port.notes)
    return (
        f"## {port.title}\n\n{port.about}\n\n"
        f"```text\npython examples/ports/{port.name}_plain.py\n"
        f"evenload run -d cpu:2 examples/ports/{port.name}_evenload.py\n```\n\n"
        f"{lengths[0]} lines become {lengths[1]}: {added} added, {removed} removed (empty lines not counted).\n\n{notes}\n"
        f"```diff\n{diff(port.name)}```\n"
    )


if __name__ == "__main__":
    print(page(), end="")
