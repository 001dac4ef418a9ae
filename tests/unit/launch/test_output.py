import io
import os
import sys
import time

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
        outputs.add(f"worker-{rank}", rank, "stdout", read)
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


def test_lines_are_whole(monkeypatch):
    assert _feed(monkeypatch, io.StringIO(), PIECES) == "half a line\nprogress 1\rü\nrest\n"


def test_on_a_terminal_other_ranks_are_marked(monkeypatch):
    mark = "\x1b[2m[rank 1]\x1b[0m "
    assert _feed(monkeypatch, _Terminal(), PIECES) == f"{mark}half a line\nprogress 1\rü\n{mark}rest\n"


def test_unbuffered_pieces_of_a_line_stay_together(monkeypatch):
    pieces = [(0, b"loss"), (1, b"from rank 1\n"), (0, b" "), (0, b"0.5"), (0, b"\n")]
    assert _feed(monkeypatch, io.StringIO(), pieces) == "from rank 1\nloss 0.5\n"


def test_a_prompt_appears_and_the_next_line_is_not_glued_to_it(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    outputs = WorkerOutputs()
    read, write = os.pipe()
    outputs.add("worker-0", 0, "stdout", read)
    os.write(write, b"prompt> ")
    outputs.pump(1.0)
    assert stream.getvalue() == ""
    time.sleep(0.06)
    outputs.pump(0.0)
    assert stream.getvalue() == "prompt> "
    outputs.end_open_lines()
    outputs.end_open_lines()
    assert stream.getvalue() == "prompt> \n"
    os.close(write)
    outputs.drain()


def test_beside_a_view_on_a_terminal_all_goes_through_it_in_whole_lines(monkeypatch):
    view = _View()
    assert _feed(monkeypatch, _Terminal(), PIECES, view) == ""
    assert "".join(view.texts) == "\x1b[2m[rank 1]\x1b[0m half a line\nprogress 1\rü\n\x1b[2m[rank 1]\x1b[0m rest\n"
    assert all(text.endswith("\n") for text in view.texts)


def test_a_view_does_not_touch_what_goes_into_a_pipe(monkeypatch):
    view = _View()
    assert _feed(monkeypatch, io.StringIO(), [(0, b"plain\n")], view) == "plain\n" and view.texts == []
