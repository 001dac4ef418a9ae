"""Find living objects of some classes, for checks that run once at the first step."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def live_objects(*kinds: type, besides: Iterable[Any] = ()) -> list[Any]:
    """Return all objects of these classes that the garbage collector tracks; about 50 ms for half a million objects.

    Those in `besides` are left out, and the schedulers that they consist of.
    """
    left_out = {id(part) for value in besides for part in (value, *getattr(value, "_schedulers", ()))}
    objects = gc.get_objects()
    # type(), not isinstance: reading __class__ of some objects runs their code.
    matching = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [value for value in objects if type(value) in matching and id(value) not in left_out]
