import pytest
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as WorkersIterator

from tests.unit.data.conftest import nothing_left_behind

__all__ = ["nothing_left_behind"]


@pytest.fixture
def torch_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks every 0.5 s for workers that have ended or hang, not every 5 s."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    monkeypatch.setattr(WorkersIterator._try_get_data, "__defaults__", (0.5,))
