"""Exit codes of the commands, declared once: `evenload COMMAND --help` and docs/commands.md list them."""

from __future__ import annotations

from collections.abc import Mapping

_USUAL = {"0": "done", "2": "an option, a setting or a request is wrong; the message says what to do"}
_SIGNALLED = {"130": "ended by Ctrl-C", "143": "ended by SIGTERM"}
_RUN = {
    "0": "all ranks succeeded",
    "1": "a rank failed, or a setting contradicts what the script sets; the error is printed once",
    "2": _USUAL["2"],
    "75": "saved and stopped on request; the same command continues",
    **_SIGNALLED,
    "other": "the script's own code, as of sys.exit(3), or 128 + N for signal N",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "run": _RUN,
    "demo": _RUN,
    "verify": {
        "0": "the gradients are equal up to rounding",
        "1": "they differ",
        "2": "the script could not be verified",
        **_SIGNALLED,
    },
    "doctor": {
        "0": "no problem",
        "1": "a problem would stop a run",
        "2": "a problem would slow it down, or an option is wrong",
    },
    "show": {**_USUAL, "1": "with --live: the run's processes are gone, and have not ended it"},
    "submit": {
        **_USUAL,
        "130": "Ctrl-C while --wait waited; the job stays",
        "other": "with --wait, the job's own code",
    },
}


def exit_codes(command: str) -> Mapping[str, str]:
    """Return the exit codes of a command and their meanings."""
    return _OWN.get(command, _USUAL)


def help_text(command: str) -> str:
    """Return the sentence below the options in a command's help."""
    return "Exit code: " + ", ".join(f"{code} ({meaning})" for code, meaning in exit_codes(command).items()) + "."
