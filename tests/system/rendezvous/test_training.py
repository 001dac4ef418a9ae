"""Two machines train one model: the example's own code, in float64, to the weights of one process."""

import pytest
import torch

from tests.paths import ROOT
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import on_both
from tests.warm import run

EXAMPLE = ROOT / "examples" / "train_gpt.py"
TINY = ("--steps", "4", "--batch-size", "10", "--width", "32", "--depth", "1", "--context", "16", "--sample-bytes", "5")
GPT64 = f"""
import runpy, torch
torch.set_default_dtype(torch.float64)
names = runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
if names["run"].is_main:
    torch.save(names["model"].state_dict(), "weights.pt")
"""


def _train(mbit_per_s):
    def act(boxes, folder):
        for box in boxes:
            box.limit(mbit_per_s)
        options = ("--balance", "7,3")
        typed = on_both(boxes, folder, GPT64, *options, initialised=False, script=("train.py", *TINY))
        return [one.end(110) for one in typed], folder

    return act


def _one_process(boxes, folder):
    folder.mkdir()
    (folder / "train.py").write_text(GPT64)
    run(["train.py", *TINY], folder, 110).check_returncode()
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def trained(can_make_machines, tmp_path_factory):
    scenarios = {"100": (2, _train(100)), "one": (0, _one_process)}
    return SideBySide(tmp_path_factory.mktemp("trained"), 2, scenarios)


@pytest.mark.slow
def test_the_example_trains_to_the_weights_of_one_process(trained):
    ends, folder = trained["100"]
    assert [code for code, _ in ends] == [0, 0], ends
    weights, expected = torch.load(folder / "box1" / "weights.pt"), trained["one"]
    assert next(iter(weights.values())).dtype == torch.float64 and weights.keys() == expected.keys()
    difference = sum(float((weights[key] - expected[key]).square().sum()) for key in expected)
    assert (difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5 < 1e-12
    first, second = (text for _, text in ends)
    for text in (first, second):
        assert "evenload: rank 0 on box1: cpu" in text and "evenload: rank 1 on box2: cpu" in text, text
    assert "validation loss" in first and "validation loss" not in second
    assert "over eth0 (10.77.0.2), which gloo and NCCL will use" in second
    assert (folder / "box1" / "runs").exists() and not (folder / "box2" / "runs").exists()
