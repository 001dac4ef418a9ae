"""Loops that scripts leave by an exception, and loops that they leave by `break` or `return`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from evenload.training.step.left_by_error import left_by_error

found: list[bool] = []


def look() -> None:
    found.append(left_by_error())


def numbers() -> Iterator[int]:
    for number in range(4):
        finished = False
        try:
            yield number
            finished = True
        finally:
            if not finished:
                look()


def wrapped() -> Iterator[int]:
    for number in numbers():
        yield 1 * number


def fail() -> None:
    raise ValueError


def breaks() -> None:
    for number in numbers():
        if number == 1:
            break


def returns() -> None:
    for _, number in enumerate(wrapped()):
        if number == 1:
            return


def breaks_after_an_error_that_is_kept() -> None:
    errors = []
    for number in numbers():
        try:
            fail()
        except ValueError as error:
            errors.append(error)
        if number == 1:
            break


def breaks_in_a_handler() -> None:
    for _ in numbers():
        try:
            fail()
        except ValueError:
            break


def raises() -> None:
    for number in numbers():
        if number == 1:
            raise ValueError


def raises_deeper() -> None:
    for _, _ in enumerate(wrapped()):
        fail()


def raises_inside_with() -> None:
    for _ in numbers():
        with contextlib.nullcontext():
            fail()


def raises_past_finally() -> None:
    for number in numbers():
        try:
            fail()
        finally:
            number += 1


def raises_again() -> None:
    for number in numbers():
        try:
            fail()
        except ValueError:
            if number == 1:
                raise


@pytest.mark.parametrize("leave", [breaks, returns, breaks_after_an_error_that_is_kept, breaks_in_a_handler])
def test_no_error(leave: Callable[[], None]) -> None:
    found.clear()
    leave()
    assert found == [False]


@pytest.mark.parametrize("leave", [raises, raises_deeper, raises_inside_with, raises_past_finally, raises_again])
def test_an_error(leave: Callable[[], None]) -> None:
    found.clear()
    with pytest.raises(ValueError):
        leave()
    assert found == [True]
