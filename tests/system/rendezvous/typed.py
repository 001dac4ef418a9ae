"""Commands as a user types them on several machines, and what each of them then reads on its screen."""

import os
import subprocess
import sys
import time

from tests.system.launch.scripts import INITIALISED
from tests.warm import Command

PORT = 29500
FOREVER = "ready()\ntime.sleep(1000)\n"


class Typed:
    """One command on one machine, in a folder of its own."""

    def __init__(self, box, folder, *arguments, env=None, program=("-m", "evenload.cli.main")):
        self.box, self.folder = box, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.screen = folder / f"screen-{len(list(folder.glob('screen-*')))}"
        self.began = time.monotonic()
        variables = {**os.environ, "TMPDIR": str(folder), **(env or {})}
        if "PYTHONPATH" in (env or {}):  # other packages than those that a warm process has
            with self.screen.open("w") as screen:
                self.process = box.popen(
                    [sys.executable, *program, *arguments],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=subprocess.STDOUT,
                    env=variables,
                )
        else:
            self.process = Command([*program, *arguments], folder, variables, host=box, output=self.screen)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def text(self):
        return self.screen.read_text()

    def until(self, *texts, timeout_s=30.0):
        """Waits for texts on the screen; the seconds since the command was typed."""
        deadline = time.monotonic() + timeout_s
        while not all(text in self.text for text in texts):
            ended = self.process.poll() is not None
            assert not ended or all(text in self.text for text in texts), self.text
            assert time.monotonic() < deadline, f"{texts} not within {timeout_s} s: {self.text}"
            time.sleep(0.02)
        return time.monotonic() - self.began

    def end(self, timeout_s=40.0):
        """Waits for the end: the exit code and the screen. Nothing of the launch may be left."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s: {self.text}") from None
        assert not list(self.folder.glob("evenload-*")), "the launch folder is left"
        return code, self.text


def write_script(folder, body, initialised=True):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text((INITIALISED if initialised else "") + body)


def type_run(box, folder, *options, script=("train.py",), env=None):
    """`evenload run` with one CPU rank, typed in a machine's folder."""
    return Typed(box, folder, "run", "-d", "cpu", *options, *script, env=env)


def on_both(boxes, tmp_path, body, *options, initialised=True, script=("train.py",), host=None):
    """The same command on two machines, each with its own copy of the script; the first is HOST."""
    typed = []
    for box in boxes:
        write_script(tmp_path / box.name, body, initialised)
        place = ["--nodes", str(len(boxes)), "--host", host or boxes[0].name]
        typed.append(type_run(box, tmp_path / box.name, *place, *options, script=script))
    return typed
