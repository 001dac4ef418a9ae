"""Fashion-MNIST as tensors: from a folder, from Debian's package, or downloaded once; with numpy and the standard library.

70,000 grayscale images of 28 x 28 pixels in 10 classes, by Zalando Research, under the MIT license.
"""

import gzip
import hashlib
import urllib.request
from pathlib import Path

import numpy as np
import torch

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""Files of Debian's package."""
DOWNLOADED = Path("data/fashion-mnist")
"""Downloaded files, in the working directory."""
ADDRESSES = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of the unpacked files."""


def find(folder: str | Path | None = None) -> Path:
    """Return the folder of the files: the given one, Debian's, or the download, which is made if necessary.

    On several ranks, call it within `run.main_first()`.

    Raises:
        SystemExit: the files are missing and cannot be downloaded; the message says how to get them.
    """
    if folder is not None:
        missing = [name for name in SHA256 if _path(Path(folder), name) is None]
        if missing:
            found = _list(Path(folder))
            raise SystemExit(f"{folder} lacks {', '.join(missing)} (packed as .gz or not); found: {found}")
        return Path(folder)
    for known in (INSTALLED, DOWNLOADED):
        if all(_path(known, name) for name in SHA256):
            return known
    try:
        download(DOWNLOADED)
    except OSError as error:
        raise SystemExit(
            f"Fashion-MNIST is neither in {INSTALLED} nor in {DOWNLOADED}, and can't be downloaded ({error}). Get it by one of\n"
            f"    apt-get install dataset-fashion-mnist\n"
            f"    wget -P {DOWNLOADED} {ADDRESSES[0]}/{{{','.join(SHA256)}}}.gz\n"
            f"or say where it is: --data FOLDER"
        ) from None
    return DOWNLOADED


def load(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the images and labels of a part.

    Args:
        folder: what `find` gave.
        part: ``train`` (60,000 images) or ``t10k`` (10,000, for testing).

    Returns:
        Images as uint8 of shape ``(n, 28, 28)``, labels as int64 of shape ``(n,)``.
    """
    images = read_idx(_path(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_path(folder, f"{part}-labels-idx1-ubyte"))
    if len(images) != len(labels):
        raise SystemExit(f"{folder} has {len(images)} {part} images, but {len(labels)} labels")
    return images, labels.long()


def read_idx(path: Path) -> torch.Tensor:
    """Read an idx file: two zeros, the type (8: bytes), the number of dimensions, their sizes, the values."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is not an idx file of bytes: it starts with {data[:4].hex(' ')} instead of 00 00 08")
    num_dims = data[3]
    shape = np.frombuffer(data, dtype=">u4", count=num_dims, offset=4).tolist()
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * num_dims)
    if values.size != np.prod(shape):
        raise SystemExit(f"{path} is truncated or damaged: its header says {shape}, but it has {values.size} values")
    return torch.from_numpy(values.reshape(shape).copy())


def download(folder: Path) -> None:
    """Download and verify the four files; each appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, sha256 in SHA256.items():
        if _path(folder, name) is not None:
            continue
        packed = _fetch(f"{name}.gz", sha256)
        partial = folder / f".{name}.partial"
        partial.write_bytes(packed)
        partial.replace(folder / f"{name}.gz")


def _fetch(name: str, sha256: str) -> bytes:
    problems = []
    for address in ADDRESSES:
        try:
            with urllib.request.urlopen(f"{address}/{name}", timeout=30) as answer:
                packed: bytes = answer.read()
            if hashlib.sha256(gzip.decompress(packed)).hexdigest() == sha256:
                return packed
            problems.append(f"{address}/{name}: another file than expected")
        except (OSError, EOFError) as error:  # no network, a wrong address, not gzip
            problems.append(f"{address}/{name}: {error}")
    raise OSError("; ".join(problems))


def _path(folder: Path, name: str) -> Path | None:
    """Return the content of the file, compressed or not."""
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _list(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
