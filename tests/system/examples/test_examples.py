"""Every example runs by `python FILE` and on two ranks of unlike shares, and learns the same on both."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.system.examples.scripts import EXAMPLES, run_both, run_on_ranks


def number(pattern: str, text: str) -> float:
    """The number in the last line that fits."""
    found = re.findall(pattern.replace("#", r"(-?[\d.]+)"), text)
    assert found, text
    return float(found[-1])


def same(pattern: str, printed: tuple[str, str], rel: float = 1e-4) -> float:
    """The number, which both printed."""
    alone, two = (number(pattern, text) for text in printed)
    assert two == pytest.approx(alone, rel=rel)
    return alone


@pytest.mark.slow
def test_tabular(tmp_path: Path) -> None:
    printed = run_both("tabular.py", tmp_path, "--epochs", "3", balance="24,8")
    same(r"epoch 2: validation loss #,", printed)
    assert same(r"# of 114 right", printed) > 100  # 72 are benign


@pytest.mark.slow
def test_fixmatch(tmp_path: Path) -> None:
    printed = run_both("fixmatch.py", tmp_path, "--epochs", "4", balance="12,4")
    assert same(r"epoch 3: loss #,", printed) < 2.3  # ten classes, 24 steps: it has begun to learn
    same(r"accuracy #%", printed, rel=0.02)


@pytest.mark.slow
def test_clip_like(tmp_path: Path) -> None:
    printed = run_both("clip_like.py", tmp_path, "--epochs", "3", balance="100,28")
    assert same(r"#% of 400 held-out", printed, rel=0.05) > 10  # 1.25 % by chance


@pytest.mark.slow
def test_gan(tmp_path: Path) -> None:
    printed = run_both("gan.py", tmp_path, "--epochs", "2", "--steps", "10", balance="48,16")
    same(r"epoch 1: loss of the discriminator #,", printed)
    same(r"epoch 1: .* of the generator #", printed)
    drawn = [line for line in printed[0].splitlines() if len(line) == 5 * 16 + 4 * 3]  # five digits side by side
    assert len(drawn) == 8


@pytest.mark.slow
def test_fashion_mnist(tmp_path: Path, clothes: Path) -> None:
    arguments = ("--data", str(clothes), "--batch-size", "16", "--steps", "4", "--epochs", "2")
    printed = run_both("train_fashion_mnist.py", tmp_path, *arguments, balance="12,4")
    same(r"of 33 images, loss #", printed)
    same(r"test accuracy #", printed)


@pytest.mark.slow
def test_resnet50(tmp_path: Path, clothes: Path) -> None:
    small = ("--data", str(clothes), "--size", "32", "--width", "16", "--batch-size", "8", "--epochs", "1")
    rest = ("--steps", "2", "--every", "1", "--workers", "1", "--export", "weights.pt")
    printed = run_both("train_resnet50.py", tmp_path, *small, *rest, balance="6,2")
    same(r"\[epoch 1, step     1 of 2\] loss #", printed)
    # 50 layers and BatchNorm over 8 images make 1e3 and more of float32's rounding in the first gradient.
    same(r"\[epoch 1, step     2 of 2\] loss #", printed, rel=0.01)
    for where in ("alone", "two"):
        weights = torch.load(tmp_path / where / "weights.pt")
        assert len(weights) == 161 + 3 * 53  # the parameters and BatchNorm's buffers of torchvision's resnet50
        assert weights["layer3.5.conv2.weight"].shape == (64, 64, 3, 3)
        assert weights["bn1.num_batches_tracked"] == 2


def test_resnet50_begins_with_the_weights_of_another_and_reads_image_folders(tmp_path: Path) -> None:
    image_folder(tmp_path / "photos", classes=("cat", "dog", "newt"), num_images=4)
    small = (
        "--size",
        "32",
        "--width",
        "4",
        "--batch-size",
        "4",
        "--epochs",
        "1",
        "--every",
        "3",
    )  # so narrow that its steps are large
    photos = ("--images", "photos", *small, "--seed", "1", "--export", "first.pt")
    (told,) = run_on_ranks(EXAMPLES / "train_resnet50.py", tmp_path, *photos, num_ranks=1)
    assert "step     3 of 3" in told
    first = torch.load(tmp_path / "first.pt")
    assert first["fc.weight"].shape == (3, 128)

    image_folder(tmp_path / "others", classes=("hot", "cold"), num_images=2)
    arguments = ("--images", "others", *small, "--weights", "first.pt", "--export", "second.pt")
    run_on_ranks(EXAMPLES / "train_resnet50.py", tmp_path, *arguments, "--project-dir", "runs/second", num_ranks=1)
    second = torch.load(tmp_path / "second.pt")
    assert second["fc.weight"].shape == (2, 128)  # its own
    assert (second["conv1.weight"] - first["conv1.weight"]).norm() < 0.5 * first["conv1.weight"].norm()  # one step away

    torch.save({"other": torch.zeros(1)}, tmp_path / "wrong.pt")
    arguments = ("--images", "others", *small, "--weights", "wrong.pt", "--project-dir", "runs/wrong")
    (told,) = run_on_ranks(EXAMPLES / "train_resnet50.py", tmp_path, *arguments, num_ranks=1)
    assert told.startswith("left: --weights wrong.pt does not fit ResNet-50: missing ['conv1.weight'")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--images", "nowhere"), "left: --images nowhere: found no images in its 0 subfolders"),
        (("--data", "nowhere"), "left: nowhere lacks train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k"),
    ],
)
def test_resnet50_without_images(tmp_path: Path, arguments: tuple[str, str], told: str) -> None:
    assert run_on_ranks(EXAMPLES / "train_resnet50.py", tmp_path, *arguments, num_ranks=1)[0].startswith(told)


def image_folder(folder: Path, classes: tuple[str, ...], num_images: int) -> None:
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(num_images):
            pixels = draws.integers(0, 256, (40, 50 + index, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.{'jpg' if index % 2 else 'png'}")


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny = ("--width", "32", "--depth", "1", "--context", "48", "--batch-size", "8", "--steps", "3", "--epochs", "1")
    printed = run_both("finetune_hf.py", tmp_path, *tiny, "--save", "model", balance="6,2")
    loss = same(r"validation loss # nats a token", printed)
    assert loss < 6.0  # ln 259 = 5.56: near chance after three steps, but not worse
    assert same(r"over ([\d,]+) tokens", tuple(text.replace(",", "") for text in printed)) > 1000
    assert "def read_" in printed[0]
    alone, two = (load_file(tmp_path / where / "model" / "model.safetensors") for where in ("alone", "two"))
    assert alone.keys() == two.keys()
    for name, weight in alone.items():
        assert torch.allclose(two[name], weight, atol=1e-4), name


@pytest.mark.slow
def test_rpc_table(tmp_path: Path) -> None:
    printed = run_both("rpc_table.py", tmp_path, "--epochs", "2", balance="24,8")
    same(r"epoch 0: mean loss by class \[#", printed, rel=0.01)
