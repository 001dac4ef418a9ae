"""`StepRate`: steps per second over the last minute, as a program reports them."""

from __future__ import annotations

from collections import deque

_SPEED_OVER_S = 60.0


class StepRate:
    """Counts steps; the first of a session (compilation, caches) is left out."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def count(self, step: int, now_s: float) -> None:
        if self._marks and step < self._marks[-1][1]:  # another loop
            self._marks.clear()
        if len(self._marks) < 2 or now_s - self._marks[-2][0] >= 1.0:
            self._marks.append((now_s, step))
        else:  # one mark per second bounds their number
            self._marks[-1] = (now_s, step)
        while len(self._marks) > 2 and now_s - self._marks[1][0] > _SPEED_OVER_S:
            self._marks.popleft()

    def steps_per_s(self) -> float:
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return 0.0
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s)
