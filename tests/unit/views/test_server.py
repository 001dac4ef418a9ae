"""The server of a page: its address alone is answered, sections come by themselves, a taken port is named."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from evenload.errors import ConfigError
from evenload.views.server import PageServer


class Stopped(Exception):
    pass


@contextmanager
def served(draw: object) -> Iterator[PageServer]:
    stop = threading.Event()

    def drawn() -> Mapping[str, str] | None:
        if stop.is_set():
            raise Stopped
        return draw()  # type: ignore[operator, no-any-return]

    def follow() -> None:
        with pytest.raises(Stopped):
            server.follow(drawn, 0.02)

    with PageServer("a title") as server:
        thread = threading.Thread(target=follow)
        thread.start()
        yield server
        stop.set()
        server._wanted.set()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_needs_the_token_and_a_local_name() -> None:
    with served(lambda: {"head": "<h1>now</h1>"}) as server:
        assert server.url.startswith("http://127.0.0.1:") and len(server.url.split("/")[3]) >= 20
        status, text = get(server.url)
        assert status == 200 and "<h1>now</h1>" in text and "data-live" in text
        root = server.url.rsplit("/", 2)[0]
        for wrong in (root, f"{root}/events", f"{root}/x/events", f"{server.url}other"):
            assert get(wrong)[0] == 404
        assert get(server.url, Host="evil.example:80")[0] == 404
        assert get(server.url, Host="localhost:1234")[0] == 200, "the end of an ssh tunnel"


def test_several_viewers_receive_only_what_changed() -> None:
    state = {"head": "one", "rest": "same"}
    with served(lambda: dict(state)) as server:
        streams = [urllib.request.urlopen(f"{server.url}events", timeout=10) for _ in range(2)]
        assert [next_data(stream) for stream in streams] == [{"head": "one", "rest": "same"}] * 2
        state["head"] = "two"
        assert [next_data(stream) for stream in streams] == [{"head": "two"}] * 2
        for stream in streams:
            stream.close()


def next_data(stream: object) -> object:
    for line in stream:  # type: ignore[attr-defined]
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    return None


def test_a_taken_port_is_named() -> None:
    with PageServer("one") as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 can't be used \(Address already in use\)"):
            PageServer("two", port)
