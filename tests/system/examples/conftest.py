"""A few clothes in Fashion-MNIST's files: cut from the real ones where they are, else drawn."""

from __future__ import annotations

import gzip
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.system.examples.scripts import EXAMPLES

NUM_TRAIN, NUM_TEST = 64, 33


@pytest.fixture
def fashion_mnist(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The loader that the examples share."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "fashion_mnist", raising=False)
    import fashion_mnist

    return fashion_mnist


@pytest.fixture
def clothes(tmp_path: Path, fashion_mnist: ModuleType) -> Path:
    """A folder with the four files."""
    folder = tmp_path / "clothes"
    folder.mkdir()
    for part, num_images in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        if fashion_mnist.INSTALLED.is_dir():
            images, labels = (read_head(fashion_mnist.INSTALLED / f"{name}.gz", num_images) for name in names)
        else:
            draws = np.random.default_rng(len(part))
            images, labels = draws.integers(0, 256, (num_images, 28, 28)), draws.integers(0, 10, num_images)
        for name, values in zip(names, (images, labels), strict=True):
            write_idx(folder / name, values)
    return folder


def read_head(path: Path, num_values: int) -> np.ndarray:
    """The first so many images or labels of a packed file."""
    with gzip.open(path) as file:
        num_dims = file.read(4)[3]
        _, *sizes = np.frombuffer(file.read(4 * num_dims), dtype=">u4").tolist()
        return np.frombuffer(file.read(num_values * math.prod(sizes)), dtype=np.uint8).reshape(num_values, *sizes)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Two zeros, the type (8: bytes), the number of dimensions, their sizes, the values."""
    sizes = np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes())
