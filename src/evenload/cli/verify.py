"""``evenload verify``: check on the user's script that a split gives the gradients of one process."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.settings import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from evenload.cli.settings import (
    ConfigFile,
    Module,
    NprocPerNode,
    Port,
    Script,
    ScriptCommand,
    merge,
    takes_settings,
)
from evenload.stored_names import VERIFY_JSON

COMMAND_CLASS = ScriptCommand

EQUAL, DIFFERENT, NOT_VERIFIED = 0, 1, 2
_SIGNALLED = (130, 143)
_WITHOUT_EFFECT = ("throttle", "log_every_s", "dry_run")
"""Keys of a file that do not concern gradients."""


@takes_settings("verify")
def verify(
    arguments: Script = None,
    module: Module = None,
    devices: Annotated[
        str | None,
        typer.Option("-d", "--devices", metavar="DEVICES", help="As for run, but two ranks on a single device."),
    ] = None,
    config: ConfigFile = None,
    port: Port = None,
    nproc_per_node: NprocPerNode = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON to stdout, and the script's output to stderr.")
    ] = False,
    **settings: Any,
) -> None:
    """Run the first step of a script on the real split and in one process, and compare the gradients.

    Shares are uneven unless --balance is given. The script is not changed, and nothing is written into its run folder.
    """
    values, _ = merge({"devices": devices, "port": port}, settings, config, nproc_per_node)
    target = ("-m", module, *(arguments or ())) if module is not None else tuple(arguments or ())
    values = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}
    values.setdefault("devices", _default_devices())
    # Under --json stdout holds the report alone.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        code, report = _launch(target, values)
    if report is not None:
        print(json.dumps(report, indent=1) if json_ else render(report), flush=True)
    raise typer.Exit(code)


def _default_devices() -> str:
    """Return all GPUs, or two ranks on a single device, so that there is a split to verify."""
    from evenload.hardware import find_gpus

    num_gpus = len(find_gpus()[0])
    return "auto" if num_gpus > 1 else "0,0" if num_gpus == 1 else "cpu:2"


def _launch(target: tuple[str, ...], values: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Return the exit code, and the report if the step was compared."""
    from evenload.training.launch.request import LaunchRequest
    from evenload.training.launch.supervisor import launch

    with tempfile.TemporaryDirectory(prefix="evenload-verify-") as folder:
        path = Path(folder) / "report.json"
        code = launch(
            LaunchRequest(
                arguments=target,
                devices=values["devices"],
                settings={key: value for key, value in values.items() if key not in ("devices", "port")},
                port=values.get("port", 0),
                mode="verify",
                options={"report": str(path)},
            )
        )
        if code:
            if code not in _SIGNALLED:
                print("evenload: not verified: the script failed", file=sys.stderr)
            return (code if code in _SIGNALLED else NOT_VERIFIED), None
        if not path.exists():
            script = " ".join(target[: 2 if target[0] == "-m" else 1])
            print(
                f"evenload: not verified: {script} ended without `step.backward(loss_fn)`; if it resumed a "
                "finished run, add --fresh to start with the script's own weights",
                file=sys.stderr,
            )
            return NOT_VERIFIED, None
        report: dict[str, Any] = json.loads(path.read_text())
    return (EQUAL if report["equal"] else DIFFERENT), report


def render(report: Mapping[str, Any]) -> str:
    calls = report["calls"]
    lines = ["", f"verify: step {report['step']} on {len(report['devices'])} ranks ({', '.join(report['devices'])})"]
    for call in calls:
        lines += _render_call(call, several=len(calls) > 1)
    lines.append("")
    if report["equal"]:
        lines.append("equal: the split gives the gradients of one process, up to rounding")
    else:
        lines.append("DIFFERENT: the split does not give the gradients of one process")
    return "\n".join(lines)


def _render_call(call: Mapping[str, Any], several: bool) -> list[str]:
    shares = " + ".join(map(str, call["shares"]))
    lines = [
        "",
        *(
            [f"call {call['call'] + 1} of step.backward: {'equal' if call['equal'] else 'DIFFERENT'}"]
            if several
            else []
        ),
        f"  samples      {call['num_samples']} = {shares}, in K = {call['num_micro']} micro-batches",
        f"  dtype        {call['dtype']}"
        + (f", not float64: {call['why_not_float64']}" if call["why_not_float64"] else ""),
        f"  limit        {call['tolerance']:g}",
    ]
    for comparison in call["comparisons"]:
        if len(call["comparisons"]) > 1:
            lines.append(f"  {comparison['what']}:")
        lines += [
            f"  ‖Δg‖/‖g‖     {_number(comparison['difference'])}   (‖g‖ = {_number(comparison['norm'])})",
            f"  loss         split {_number(comparison['loss_split'], 12)}, one process "
            f"{_number(comparison['loss_one_process'], 12)}",
        ]
    worst = [*call["comparisons"][-1]["worst"], *call["comparisons"][-1][VERIFY_JSON["unprepared"]][:5]]
    if worst:
        width = max(len(one["name"]) for one in worst)
        lines.append(f"  {'worst':<{width + 2}}  of its own ‖g‖   of the whole ‖g‖")
        lines += [
            f"    {one['name']:<{width}}  {_number(one['difference']):<14}   {_number(one['part'])}" for one in worst
        ]
    for cause in call["causes"]:
        lines += ["", *_wrap(f"  {cause['kind']}: ", cause["finding"]), *_wrap("    → ", cause[VERIFY_JSON["fix"]])]
    lines += [line for note in call["notes"] for line in _wrap("  note: ", note)]
    return lines


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "not finite"
    return f"{value:.{digits}g}" if digits > 2 else f"{value:.1e}"


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, width=110, initial_indent=head, subsequent_indent=" " * 4, break_on_hyphens=False)
