"""Names of jobs: of any script, and such as look like numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.job_lookup import ids_of
from evenload.scheduler.job_syntax import read_after, read_name
from evenload.scheduler.store.writer import QueueStore
from evenload.views.queue.text import aligned
from tests.unit.scheduler.queue import spec


@pytest.mark.parametrize("name", ["größe", "学習", "обучение-2", "हिन्दी", "naïve.v1", "_a", "x+y=2@,-"])
def test_names_of_any_script(name: str) -> None:
    assert read_name(name) == name
    assert read_after([f"{name}:any"])[0].job == name


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "-a", "a\x1b", "a\u202eb", "a:b", "a[1]", "a\u3000b", "\u0301a", "x" * 101]
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match="any script"):
        read_name(name)


def test_one_name_has_one_spelling() -> None:
    assert read_name("gro\u0308\u00dfe") == "gr\u00f6\u00dfe"


def test_a_job_whose_name_is_a_number_is_found(tmp_path: Path) -> None:
    with QueueStore(tmp_path, holder="test") as store:
        for number, name in ((1, "12"), (2, "3-4"), (3, "größe")):
            store.record(events.Submitted(float(number), str(number), spec(name=name)))
        store.commit()
        assert ids_of(["12"], tmp_path) == ["1"]  # there is no job 12
        assert ids_of(["name=12", "name=3-4", "größe"], tmp_path) == ["1", "2", "3"]
        assert ids_of(["2", "77"], tmp_path) == ["2", "77"]  # the daemon says that there is none
        for number in range(4, 13):
            store.record(events.Submitted(float(number), str(number), spec()))
        store.commit()
        assert ids_of(["12", "name=12"], tmp_path) == ["12", "1"]
        with pytest.raises(QueueError, match="no job 'nobody'"):
            ids_of(["name=nobody"], tmp_path)


def test_wide_letters_keep_columns_in_line() -> None:
    first, second = aligned([("学習", "b"), ("abcd", "c")])
    assert (first, second) == ("学習  b", "abcd  c")
