"""Scenarios that run side by side, each on machines of its own: most of their time is waiting."""

from concurrent.futures import Future, ThreadPoolExecutor

from evenload.testing import hosts


class SideBySide:
    """What became of some scenarios; each test asks for the one that it is about."""

    def __init__(self, folder, num_at_once, scenarios):
        """``scenarios``: by name, the number of machines and a function of machines and folder."""
        self._ends: dict[str, Future] = {}
        with ThreadPoolExecutor(num_at_once) as pool:
            for name, (num_boxes, act) in scenarios.items():
                self._ends[name] = pool.submit(self._run, num_boxes, act, folder / name)

    def __getitem__(self, name):
        return self._ends[name].result()

    @staticmethod
    def _run(num_boxes, act, folder):
        with hosts.machines(num_boxes) as boxes:
            return act(boxes, folder)
