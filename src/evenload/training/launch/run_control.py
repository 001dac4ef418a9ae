"""Requests to a running `evenload run` from other processes: a socket in its launch folder, named by a file in the run folder.

A client sends one line of JSON, ``{"devices": "0,1,cpu"}``, and receives lines: ``{"text": ...}`` for people, ``{"error": ...}``
if the request is refused, ``{"done": true}`` once the change has taken effect. Only the user who started the run may connect.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError, EvenloadError
from evenload.job.processes import ProcessIdentity, identity_of, is_alive

LAUNCH_FILE = "launch.json"
"""File in the run folder while the run is in progress: the socket, the supervisor's process, and the members."""
RUN_FOLDER_FILE = "run_folder"
"""File in the launch folder to which rank 0 writes the path of the run folder."""
_SOCKET = "control"
_MOST_BYTES = 65536
_MOST_ADDRESS_BYTES = 100


class RunControl:
    """The supervisor's end; `poll` never waits."""

    def __init__(self, launch_folder: Path) -> None:
        self._path = launch_folder / _SOCKET
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        with _short_address(self._path) as address:
            self._listener.bind(address)
        self._path.chmod(0o600)
        self._listener.listen()
        self._reading: dict[socket.socket, bytes] = {}
        self._waiting: list[tuple[socket.socket, str, list[str]]] = []
        """Clients whose change has not taken effect, the devices as they named them, and one by one."""
        self._run_folder: Path | None = None
        self._members: list[str] = []

    def announce(self, run_folder: Path, members: Sequence[str]) -> None:
        """Write the file in the run folder, if something in it has changed."""
        if (self._run_folder, self._members) == (run_folder, [*members]):
            return
        self._run_folder, self._members = run_folder, [*members]
        process = identity_of(os.getpid())
        content = {
            "socket": str(self._path),
            "process": None if process is None else [process.pid, process.start_ticks, process.boot_id],
            "members": self._members,
        }
        with suppress(OSError):  # the folder may be full or gone, which is no reason to end the run
            write_atomically(run_folder / LAUNCH_FILE, json.dumps(content))

    def poll(self, change_devices: Callable[[str], tuple[Sequence[str], list[str]]], changes: bool) -> None:
        """Answer requests; `change_devices` returns lines and all devices; `changes`: one has not taken effect."""
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._reading[connection] = b""
        for connection, before in list(self._reading.items()):
            try:
                chunk = connection.recv(_MOST_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            text = before + chunk
            if not chunk or len(text) > _MOST_BYTES:
                del self._reading[connection]
                connection.close()
            elif b"\n" not in text:
                self._reading[connection] = text
            else:
                del self._reading[connection]
                self._answer(connection, text, change_devices)
                changes = True  # the clients learn at the next poll
        if not changes:
            for connection, devices, wanted in self._waiting:
                found = [member.partition(": ")[2] for member in self._members]
                why = f"the run is on {', '.join(found)} instead of -d {devices}"
                _send(connection, {"done": True} if sorted(found) == sorted(wanted) else {"error": why})
                connection.close()
            self._waiting.clear()

    def close(self) -> None:
        """Close all connections; the file in the run folder stays, because this process may start the ranks again."""
        for connection in (*self._reading, *(waiting for waiting, *_ in self._waiting), self._listener):
            connection.close()

    def retract(self) -> None:
        """Remove the file in the run folder, if it is of these ranks: the launch has ended."""
        if self._run_folder is not None:
            path = self._run_folder / LAUNCH_FILE
            with suppress(OSError, ValueError):
                if json.loads(path.read_text())["socket"] == str(self._path):  # another run may have begun there
                    path.unlink()

    def _answer(
        self, connection: socket.socket, text: bytes, change_devices: Callable[[str], tuple[Sequence[str], list[str]]]
    ) -> None:
        try:
            devices = str(json.loads(text)["devices"])
            lines, names = change_devices(devices)
        except EvenloadError as error:
            _send(connection, {"error": str(error)})
        except (ValueError, KeyError, TypeError):
            _send(connection, {"error": "the request can't be read: the versions of Evenload differ"})
        else:
            for line in lines:
                _send(connection, {"text": line})
            for earlier, others, _ in self._waiting:
                if others != devices:
                    _send(earlier, {"error": f"a later change replaced this one: -d {devices}"})
                    earlier.close()
            self._waiting = [row for row in self._waiting if row[1] == devices] + [(connection, devices, names)]
            return
        connection.close()


def read_run_folder(launch_folder: Path) -> Path | None:
    """Return the folder of the newest run of a launch; None before `evenload.init`."""
    path = launch_folder / RUN_FOLDER_FILE
    return Path(path.read_text().strip()) if path.exists() else None


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def members_of(run_folder: Path) -> list[str]:
    """Return a line for each member of a run in progress on this machine; none of another run."""
    try:
        content = json.loads((run_folder / LAUNCH_FILE).read_text())
        alive = content["process"] is not None and is_alive(ProcessIdentity(*content["process"]))
        return [str(member) for member in content["members"]] if alive else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


@contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """Yield a name of the socket: its path, or a shorter one where the system would not take that (more than 107 bytes)."""
    if len(os.fsencode(path)) < _MOST_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def change_devices_of(run_folder: Path, devices: str) -> Iterator[str]:
    """Request other devices of a running run; yield what happens, until the change has taken effect.

    ConfigError: the run is not in progress, was not started by ``evenload run`` of this user on this machine, or refuses.
    """
    try:
        address = json.loads((run_folder / LAUNCH_FILE).read_text())["socket"]
        with socket.socket(socket.AF_UNIX) as connection:
            with _short_address(Path(address)) as short:
                connection.connect(short)
            _send(connection, {"devices": devices})
            for line in connection.makefile():
                message = json.loads(line)
                if "error" in message:
                    raise ConfigError(f"{run_folder}: {message['error']}")
                if "done" in message:
                    return
                yield str(message["text"])
    except EvenloadError:
        raise
    except PermissionError as error:
        raise ConfigError(f"{run_folder}: the run belongs to another user, who alone can change it") from error
    except (OSError, ValueError, KeyError) as error:
        if members_of(run_folder):
            raise ConfigError(f"{run_folder}: all ranks start again; change the devices once they train") from error
        raise ConfigError(
            f"{run_folder} is not in progress on this machine, so its devices can't change; `evenload run -d {devices} ...` "
            "continues it on these, at its newest checkpoint"
        ) from error
    raise ConfigError(f"{run_folder}: the run ended before the change took effect")
