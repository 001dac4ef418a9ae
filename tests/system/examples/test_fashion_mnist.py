"""The loader of Fashion-MNIST: real files, packed files, damaged files, a download from a server of our own."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.system.examples.conftest import NUM_TEST, NUM_TRAIN


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, clothes: Path) -> Iterator[str]:
    """The address of the clothes' files, packed."""
    served = tmp_path / "served"
    served.mkdir()
    for path in clothes.iterdir():
        (served / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


@pytest.fixture
def nowhere(tmp_path: Path, fashion_mnist: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither installed nor downloaded yet; what is downloaded goes here."""
    monkeypatch.setattr(fashion_mnist, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(fashion_mnist, "DOWNLOADED", tmp_path / "data" / "clothes")
    monkeypatch.setattr(fashion_mnist, "ADDRESSES", ("http://127.0.0.1:9/nothing",))
    return tmp_path / "data" / "clothes"


def test_reads_a_folder_packed_or_not(fashion_mnist: ModuleType, clothes: Path) -> None:
    images, labels = fashion_mnist.load(fashion_mnist.find(clothes), "train")
    assert (images.shape, images.dtype) == ((NUM_TRAIN, 28, 28), torch.uint8)
    assert (labels.shape, labels.dtype) == ((NUM_TRAIN,), torch.int64)
    path = clothes / "train-images-idx3-ubyte"
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert torch.equal(fashion_mnist.load(fashion_mnist.find(clothes), "train")[0], images)


def test_downloads_once_and_checks(
    fashion_mnist: ModuleType, clothes: Path, server: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = {name: hashlib.sha256((clothes / name).read_bytes()).hexdigest() for name in fashion_mnist.SHA256}
    monkeypatch.setattr(fashion_mnist, "ADDRESSES", (f"{server}/not-here", server))
    monkeypatch.setattr(fashion_mnist, "SHA256", sums)
    folder = fashion_mnist.find()
    assert folder == nowhere
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in sums)
    assert torch.equal(fashion_mnist.load(folder, "t10k")[0], fashion_mnist.load(clothes, "t10k")[0])
    monkeypatch.setattr(fashion_mnist, "ADDRESSES", ())
    assert fashion_mnist.find() == nowhere  # nothing is asked for any more

    shutil.rmtree(folder)
    monkeypatch.setattr(fashion_mnist, "ADDRESSES", (server,))
    monkeypatch.setitem(sums, "t10k-labels-idx1-ubyte", "0" * 64)
    with pytest.raises(SystemExit, match=r"t10k-labels-idx1-ubyte\.gz: another file than expected"):
        fashion_mnist.find()


def test_where_nothing_is_it_says_how_to_get_it(fashion_mnist: ModuleType, nowhere: Path) -> None:
    with pytest.raises(SystemExit) as told:
        fashion_mnist.find()
    for words in ("can't be downloaded", "apt-get install dataset-fashion-mnist", "wget -P", "--data FOLDER"):
        assert words in str(told.value)


def test_damaged_files(fashion_mnist: ModuleType, clothes: Path) -> None:
    images, labels = clothes / "t10k-images-idx3-ubyte", clothes / "t10k-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    with pytest.raises(SystemExit, match=rf"damaged: its header says \[{NUM_TEST}, 28, 28\], but it has 25867 values"):
        fashion_mnist.load(clothes, "t10k")
    images.write_bytes(b"<html>no such file</html>")
    with pytest.raises(SystemExit, match="is not an idx file of bytes: it starts with 3c 68 74 6d"):
        fashion_mnist.load(clothes, "t10k")
    images.write_bytes(whole)
    labels.write_bytes((clothes / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(SystemExit, match=f"has {NUM_TEST} t10k images, but {NUM_TRAIN} labels"):
        fashion_mnist.load(clothes, "t10k")
    labels.unlink()
    with pytest.raises(SystemExit, match="lacks t10k-labels-idx1-ubyte"):
        fashion_mnist.find(clothes)


def test_the_installed_files_are_the_published_ones(fashion_mnist: ModuleType) -> None:
    if not fashion_mnist.INSTALLED.is_dir():
        pytest.skip(f"{fashion_mnist.INSTALLED} is not here; apt-get install dataset-fashion-mnist")
    assert len(fashion_mnist.SHA256) == 4
    for name, sha256 in fashion_mnist.SHA256.items():
        packed = (fashion_mnist.INSTALLED / f"{name}.gz").read_bytes()
        assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == sha256
