"""Syntax of the values in a job file and in the options of `evenload submit`: `2:4`, `20G`, `2h:3h`, `0-9%4`, `12:any`.

An invalid value raises a `ValueError` with what was expected; `job_file` adds where it was written.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import unicodedata
from collections.abc import Iterable
from typing import Any

from evenload.scheduler.core.values import After

MAX_ARRAY = 1_000
"""Elements of an array: each is a job, and all are submitted in one message."""
MAX_DEVICES = 100_000
MAX_DURATION_S, MAX_GRACE_S, MIN_IDLE_END_S = 3650 * 86400.0, 86400.0, 10.0

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_UNITS_BYTES = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_LONGEST_NAME, _LONGEST_JOB = 100, 200
_NAME_SIGNS = frozenset("_.+=@,-")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONDITIONS = ("ok", "any", "failed")
_NOTIFIERS = ("command", "webhook", "mail")


def read_text(value: Any) -> str:
    if not isinstance(value, str) or not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise ValueError("one line of text")
    return value


def read_name(value: Any) -> str:
    if not isinstance(value, str) or not _is_name(value, _LONGEST_NAME):
        raise ValueError(
            "a name of letters and digits of any script and _ . + = @ , - (at most 100, the first a letter, digit or _)"
        )
    return unicodedata.normalize("NFC", value)


def _is_name(text: str, longest: int) -> bool:
    """Return True for a name: no spaces, no control characters, and of ASCII's signs only those of `_NAME_SIGNS`."""
    if not 0 < len(text) <= longest or text[0] in _NAME_SIGNS - {"_"} or unicodedata.category(text[0]).startswith("M"):
        return False
    return all(
        letter.isalnum() or letter in _NAME_SIGNS or (ord(letter) > 127 and letter.isprintable() and letter != "\u3000")
        for letter in text
    )


def read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def read_count(least: int, most: int, what: str) -> Any:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{what} from {least} to {most}")
        return value

    return read


def read_words(value: Any) -> tuple[str, ...]:
    """Parse a command: a list of words, or a text that is split like in a shell."""
    if isinstance(value, str):
        import shlex

        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"a command line that can be split into words ({error})") from None
    words = value if isinstance(value, list | tuple) else ()
    if not words or not words[0] or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError('a command, such as "python train.py" or ["python", "train.py"]')
    return tuple(words)


def read_devices(value: Any) -> tuple[int, int]:
    """Parse `4` or `2:8` as (minimum, maximum)."""
    expected = ValueError("MIN:MAX with 1 <= MIN <= MAX, or one number, such as 2 or 1:4")
    if isinstance(value, bool):
        raise expected
    least, colon, most = str(value).partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise expected
    both = int(least), int(most) if colon else int(least)
    if not 1 <= both[0] <= both[1] <= MAX_DEVICES:
        raise expected
    return both


def read_kinds(value: Any) -> tuple[str, ...]:
    """Parse `a100`, `a100,h100` or a list."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(p, str) and p.strip() for p in parts):
        raise ValueError('the name of a kind of device, or several, such as "a100" or ["a100", "h100"]')
    return tuple(dict.fromkeys(part.strip() for part in parts))


def read_bytes(value: Any) -> int:
    """Parse `20G`, `512M`, `40GiB`. G is 10^9, as in the names of GPUs: an 80 GB GPU has a little under 80 GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT]I?)B?|B)", value.upper()) if isinstance(value, str) else None
    if found is None or float(found[1]) <= 0:
        raise ValueError("a size with its unit, such as 20G or 512M (G is 10^9 bytes, GiB 2^30)")
    return round(float(found[1]) * _UNITS_BYTES[found[2] or ""])


def read_duration_s(value: Any, most_s: float = MAX_DURATION_S) -> float:
    """Parse `90s`, `45m`, `2h`, `1d12h`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw])", value) if isinstance(value, str) else []
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != value or not 0 < seconds < math.inf:
        raise ValueError("a time with its unit, such as 90s, 45m, 2h or 1d12h")
    if seconds > most_s:
        raise ValueError(f"a time of at most {duration_text(most_s)}")
    return seconds


def read_grace_s(value: Any) -> float:
    """Parse a duration of at most a day: so long a job that must stop keeps its devices from others."""
    return read_duration_s(value, MAX_GRACE_S)


def read_idle_end_s(value: Any) -> float:
    """Parse a duration of at least ten seconds: so often it is measured whether devices are used."""
    seconds = read_duration_s(value)
    if seconds < MIN_IDLE_END_S:
        raise ValueError(f"a time of at least {duration_text(MIN_IDLE_END_S)}: use is measured that often")
    return seconds


def read_time_of_day_s(value: str, now_s: float) -> float:
    """Parse `09:00` (the next), `mon 09:00` or `2026-12-01 09:00`, by the wall clock; return seconds since 1970."""
    found = re.fullmatch(r"(?:(\d{4})-(\d\d)-(\d\d) |([a-z]{3}) )?(\d{1,2}):(\d\d)", value.strip().lower())
    expected = "a time such as 09:00, mon 09:00 or 2026-12-01 09:00"
    if found is None or (found[4] and found[4] not in _WEEKDAYS) or int(found[5]) > 23 or int(found[6]) > 59:
        raise ValueError(expected)
    clock_time = (int(found[5]), int(found[6]), 0, 0, 0, -1)
    if found[1]:
        date = (int(found[1]), int(found[2]), int(found[3]))
        time_s = time.mktime((*date, *clock_time))
        if time.localtime(time_s)[:3] != date:
            raise ValueError(expected)
        return time_s
    today = time.localtime(now_s)
    for days in range(8):
        time_s = time.mktime((today.tm_year, today.tm_mon, today.tm_mday + days, *clock_time))
        if time_s >= now_s and found[4] in (None, _WEEKDAYS[time.localtime(time_s).tm_wday]):
            return time_s
    raise ValueError(expected)


def read_moment(value: Any) -> str:
    """Check a time counted from the submission (`8h`) or a time of day (`mon 09:00`); return it as it was written."""
    expected = "a time such as 8h from now, or a time of day such as 09:00, mon 09:00 or 2026-12-01 09:00"
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            if moment_s(value, time.time()) >= time.time():
                return value
            expected = "a time that is to come"
    raise ValueError(expected)


def moment_s(text: str, now_s: float) -> float:
    """Return the seconds since 1970 of a time that `read_moment` accepts."""
    return read_time_of_day_s(text, now_s) if ":" in text else now_s + read_duration_s(text)


def delays_of(**moments: str) -> tuple[str, ...]:
    """Return the names of the given times that count from now, such as `8h`; the others are times of day, or empty."""
    return tuple(name for name, text in moments.items() if text and ":" not in text)


def read_limits_s(value: Any) -> tuple[float | None, float | None]:
    """Parse `SOFT`, `SOFT:HARD` or `:HARD`."""
    text = "SOFT or SOFT:HARD or :HARD, such as 2h, 2h:3h or :3h"
    if not isinstance(value, str):
        raise ValueError(text)
    first, colon, second = value.partition(":")
    try:
        soft_s = read_duration_s(first) if first or not colon else None
        hard_s = read_duration_s(second) if colon else None
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    if soft_s is not None and hard_s is not None and soft_s >= hard_s:
        raise ValueError(f"{text}, the soft limit below the hard one")
    return soft_s, hard_s


def read_after(value: Any) -> tuple[After, ...]:
    """Parse `12`, `12:any`, or a list: a job's number or name, and how it must have ended."""
    found = []
    for text in value if isinstance(value, list | tuple) else (value,):
        job, colon, condition = str(text).partition(":")
        if isinstance(text, bool) or not _is_name(job, _LONGEST_JOB) or (colon and condition not in _CONDITIONS):
            raise ValueError("JOB or JOB:ok, JOB:any, JOB:failed, with the job's number or name")
        found.append(After(job, condition or "ok"))
    names = [after.job for after in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"each job once; {', '.join(sorted(twice))} appears twice")
    return tuple(found)


def read_array(value: Any) -> tuple[tuple[int, ...], int | None]:
    """Parse `0-9`, `1,3,8-12`, `0-99:10`, each with `%4` for at most four at once, as (indices, limit)."""
    expected = f"indices such as 0-9, 1,3,8-12 or 0-90:10, optionally with %LIMIT, at most {MAX_ARRAY} of them"
    if not isinstance(value, str):
        raise ValueError(expected)
    text, percent, limit = value.partition("%")
    if percent and (not limit.isdecimal() or int(limit) < 1):
        raise ValueError(expected)
    indices: dict[int, None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part.strip())
        if found is None:
            raise ValueError(expected)
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1 or (last - first) // step + 1 > MAX_ARRAY:
            raise ValueError(expected)
        indices.update(dict.fromkeys(range(first, last + 1, step)))
    if len(indices) > MAX_ARRAY:
        raise ValueError(expected)
    return tuple(indices), int(limit) if percent else None


def read_environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError('a table of variables, such as { SEED = "1" }')
    for name, part in value.items():
        read_variable(name)
        if isinstance(part, bool) or not isinstance(part, str | int | float) or "\0" in str(part):
            raise ValueError(f"a text or a number for the variable {name}")
    return {name: str(part) for name, part in value.items()}


def read_variables(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise ValueError('a list of names of variables, such as ["WANDB_API_KEY"]')
    return tuple(dict.fromkeys(read_variable(name) for name in names))


def read_variable(name: Any) -> str:
    """Parse the name of a variable that a job may set; EVENLOAD_ variables are reserved."""
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise ValueError(f"the name of an environment variable, such as SEED, not {name!r}")
    if name.startswith("EVENLOAD_"):
        raise ValueError(f"a variable other than {name}: names that begin with EVENLOAD_ are reserved")
    return name


def read_paths(value: Any) -> tuple[str, ...]:
    """Parse folders below the job's own."""
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, list | tuple):
        raise ValueError('a list of folders below the job\'s own, such as ["data", "runs"]')
    for path in paths:
        if read_text(path).startswith(("/", "~")) or ".." in path.split("/") or path.strip("./") == "":
            raise ValueError(f"folders below the job's own, not {path!r}")
    return tuple(dict.fromkeys(path.rstrip("/") for path in paths))


def read_notify(value: Any) -> tuple[str, ...]:
    """Parse `command:…`, `webhook:URL`, `mail:ADDRESS`; one or a list."""
    texts = (value,) if isinstance(value, str) else value
    expected = "command:COMMAND, webhook:URL or mail:ADDRESS"
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(expected)
    for text in texts:
        kind, _, rest = read_text(text).partition(":")
        if kind not in _NOTIFIERS or not rest.strip():
            raise ValueError(expected)
        if kind == "webhook" and not re.match(r"https?://[^/\s]+", rest):
            raise ValueError(f"{expected}; {rest!r} is not a URL that begins with http:// or https://")
        if kind == "mail" and not re.fullmatch(r"[^\s@,:-][^\s@,:]*(@[^\s@,:]+)?", rest):
            raise ValueError(f"{expected}; {rest!r} is not a mail address")
        if kind == "command":
            read_words(rest)
    return tuple(dict.fromkeys(texts))


def read_options(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError('a table, such as [slurm] with partition = "gpu" below it')
    for name, part in value.items():
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise ValueError(f"a text or a number for {name}")
    return {str(name): str(part) for name, part in value.items()}


def duration_text(seconds: float) -> str:
    """Return `1h30m` for 5400; `read_duration_s` reads it back."""
    left, parts = seconds, []
    for unit in ("d", "h", "m"):
        number, left = divmod(left, _UNITS_S[unit])
        if number:
            parts.append(f"{number:.0f}{unit}")
    if left or not parts:
        parts.append(f"{left:g}s")
    return "".join(parts)


def bytes_text(size: int) -> str:
    """Return `20G` for 2·10^10; `read_bytes` reads it back."""
    for unit in ("T", "G", "TI", "GI", "M", "MI"):
        if size % _UNITS_BYTES[unit] == 0:
            return f"{size // _UNITS_BYTES[unit]}{unit.replace('I', 'iB')}"
    return f"{size}B"


def array_text(indices: Iterable[int], limit: int | None) -> str:
    """Return `0-3,7%2`; `read_array` reads it back."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return text if limit is None else f"{text}%{limit}"


def after_texts(afters: Iterable[After]) -> list[str]:
    """Return `12` or `12:any` for each; `read_after` reads them back."""
    return [after.job if after.condition == "ok" else f"{after.job}:{after.condition}" for after in afters]


def devices_text(least: int, most: int) -> int | str:
    """Return `2` or `2:8`; `read_devices` reads it back."""
    return least if least == most else f"{least}:{most}"


def limits_text(soft_s: float | None, hard_s: float | None) -> str:
    """Return `2h`, `2h:3h` or `:3h`; `read_limits_s` reads it back."""
    soft = "" if soft_s is None else duration_text(soft_s)
    return soft if hard_s is None else f"{soft}:{duration_text(hard_s)}"
