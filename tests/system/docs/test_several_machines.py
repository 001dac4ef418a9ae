"""Every command of docs/several-machines.md, typed on the machines that it names."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import Typed, write_script

PAGE = ROOT / "docs" / "several-machines.md"
BLOCKS = dict(enumerate(re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)))
BODY = "print('trained as rank', spec.rank, 'of', spec.world_size)"


def _type(block):
    def act(boxes, folder):
        by_name = {box.name: box for box in boxes}
        servers, others = [], []
        for box in boxes:
            write_script(folder / box.name, BODY)
            (folder / box.name / "data").mkdir()
            (folder / box.name / "data" / "part").write_text("the same")
        for line in block.splitlines():
            name, command = line.split("$ evenload ")
            words = shlex.split(command)
            if words[0] == "run":
                words[1:1] = ["-d", "cpu"]
            typed = Typed(by_name[name], folder / name, *words)
            if "--serve" in words:
                typed.until("answering at port")
                servers.append(typed)
            else:
                others.append(typed)
        ends = [typed.end(60) for typed in others]
        for server in servers:
            server.process.send_signal(signal.SIGINT)
            assert server.end()[0] == 0
        return ends

    return act


@pytest.fixture(scope="module")
def typed(can_make_machines, tmp_path_factory):
    scenarios = {str(number): (2, _type(block)) for number, block in BLOCKS.items()}
    return SideBySide(tmp_path_factory.mktemp("docs"), 3, scenarios)


def test_there_are_commands():
    assert len(BLOCKS) >= 4
    for block in BLOCKS.values():
        assert all(re.match(r"box[12]\$ evenload (run|doctor) ", line) for line in block.splitlines()), block


@pytest.mark.slow
@pytest.mark.parametrize("number", BLOCKS)
def test_commands(typed, number):
    for code, text in typed[str(number)]:
        if " doctor " in BLOCKS[number]:
            assert code in (0, 2) and "bandwidth" in text and "same data    data with 1 file" in text, text
        else:
            assert code == 0 and "trained as rank" in text, text


def test_the_python_of_the_page_runs(can_make_machines, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    write_script(tmp_path, BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    exec(compile(code, str(PAGE), "exec"), {})
