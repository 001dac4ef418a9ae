from tests.unit.data.conftest import nothing_left_behind

__all__ = ["nothing_left_behind"]
