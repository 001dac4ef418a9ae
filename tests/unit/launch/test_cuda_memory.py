import sys

import pytest

from evenload.training.launch.cuda_memory import VARIABLES, allocator_variables

ON = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("devices", "variables", "supported", "expected"),
    [
        (["cuda:1"], {}, {1}, ON),
        (["cuda:0", "cuda:0", "cuda:1"], {}, {0, 1}, ON),
        (["cuda:0", "cuda:1"], {}, {0}, {}),
        (["cpu"], {}, {0}, {}),
        (["auto"], {}, {0}, {}),
        *[(["cuda:0"], {name: "max_split_size_mb:64"}, {0}, {}) for name in VARIABLES],
        (["cuda:0"], {VARIABLES[1]: ""}, {0}, {}),
    ],
)
def test_expandable_segments(devices, variables, supported, expected):
    assert allocator_variables(devices, variables, supported.__contains__) == expected


def test_not_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert allocator_variables(["cuda:0"], {}, lambda index: True) == {}


def test_no_driver_no_setting():
    assert allocator_variables(["cuda:99"], {}) == {}


@pytest.mark.gpu
def test_torch_takes_the_setting():
    import subprocess

    variables = allocator_variables(["cuda:0"], {})
    program = "import torch; torch.ones(1, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**variables}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(bool(variables)), done.stderr
