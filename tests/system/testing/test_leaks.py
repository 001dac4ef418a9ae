"""The guard of tests/conftest.py, on tests that leak on purpose."""

import subprocess
import sys

import pytest

from tests.paths import TESTS

CONFTEST = TESTS / "conftest.py"


def _run(folder, body):
    (folder / "conftest.py").write_text(CONFTEST.read_text().replace("_GRACE_S = 2.0", "_GRACE_S = 0.1"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs one\n")
    (folder / "test_it.py").write_text(body + "\n\ndef test_next():\n    pass\n")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hypothesispytest",
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import subprocess\ndef test_a():\n    global p\n    p = subprocess.Popen(['sleep', '99'])", "sleep 99"),
        (
            "import threading, time\n"
            "def test_a():\n    threading.Thread(target=time.sleep, args=(1,), name='late').start()",
            "the thread 'late'",
        ),
        ("import os\ndef test_a():\n    os.environ['NEW_ONE'] = '1'", "environment variables NEW_ONE"),
        ("import torch\ndef test_a():\n    torch.set_default_dtype(torch.float64)", "default dtype at torch.float64"),
        ("import torch\ndef test_a():\n    torch.set_num_threads(7)", "number of threads at 7"),
    ],
)
def test_a_leak_is_named_and_the_next_test_is_clean(tmp_path, body, told):
    output = _run(tmp_path, body)
    assert "test_it.py::test_a leaves behind" in output and told in output
    assert "2 passed, 1 error" in output


def test_a_gpu_test_is_skipped_with_the_reason(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    output = _run(tmp_path, "import pytest\n@pytest.mark.gpu\ndef test_a():\n    assert False")
    assert "1 passed, 1 skipped" in output and "needs a CUDA device" in output
