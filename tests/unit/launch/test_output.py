import io
import os
import sys

from evenload.training.launch.output import WorkerOutputs


class _Terminal(io.StringIO):
    def isatty(self):
        return True


class _View:
    def __init__(self):
        self.texts = []

    def follow(self, folder): ...

    def poll(self): ...

    def print(self, text):
        self.texts.append(text)

    def close(self): ...


def _feed(monkeypatch, stream, pieces, view=None):
    """Sends (rank, bytes) through pipes, piece by piece, and returns what the stream got."""
    monkeypatch.setattr(sys, "stdout", stream)
    outputs = WorkerOutputs()
    outputs.view = view
    ends = {}
    for rank in (0, 1):
        read, write = os.pipe()
        outputs.add(rank, "stdout", read)
        ends[rank] = write
    for rank, data in pieces:
        os.write(ends[rank], data)
        outputs.pump(1.0)
    for end in ends.values():
        os.close(end)
    outputs.drain()
    outputs.drain()
    return stream.getvalue()


PIECES = [(1, b"half a "), (0, b"progress 1\r"), (1, b"line\nrest"), (0, "ü".encode()[:1]), (0, "ü".encode()[1:])]


def test_in_a_pipe_rank_0_is_as_it_is_and_others_come_in_whole_lines(monkeypatch):
    assert _feed(monkeypatch, io.StringIO(), PIECES) == "progress 1\rhalf a line\nürest\n"


def test_on_a_terminal_other_ranks_are_marked(monkeypatch):
    mark = "\x1b[2m[rank 1]\x1b[0m "
    assert _feed(monkeypatch, _Terminal(), PIECES) == f"progress 1\r{mark}half a line\nü{mark}rest\n"


def test_beside_a_view_on_a_terminal_all_goes_through_it_in_whole_lines(monkeypatch):
    view = _View()
    assert _feed(monkeypatch, _Terminal(), PIECES, view) == ""
    assert "".join(view.texts) == "\x1b[2m[rank 1]\x1b[0m half a line\nprogress 1\rü\n\x1b[2m[rank 1]\x1b[0m rest\n"
    assert all(text.endswith("\n") for text in view.texts)


def test_a_view_does_not_touch_what_goes_into_a_pipe(monkeypatch):
    view = _View()
    assert _feed(monkeypatch, io.StringIO(), [(0, b"plain\n")], view) == "plain\n" and view.texts == []
