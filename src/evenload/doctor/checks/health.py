"""Is a GPU held down by heat or settings, badly connected, or failing?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from evenload.doctor.checks.lineup import NO_GPU
from evenload.doctor.finding import Finding, Options
from evenload.doctor.gpu_state import (
    SLOWED_BY_HARDWARE,
    SLOWED_BY_HEAT,
    SLOWED_BY_SETTING,
    SLOWED_BY_SUPPLY,
    Card,
    read_cards,
)

THROTTLING, CLOCKS, LINKS, ERRORS = "GPU throttling", "GPU clocks", "GPU links", "GPU errors"
LOW_POWER_FRACTION = 0.95
NARROW_FACTOR = 4
"""x4 of x16 is felt in every step; x8 of x16 hardly, and is usual with two GPUs."""
HARDWARE_XIDS = {
    48: "uncorrected memory error",
    61: "internal fault",
    62: "internal fault",
    63: "memory row being replaced",
    64: "memory row that can't be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its firmware (GSP) doesn't answer",
    120: "its firmware (GSP) failed",
}
"""Those that hardware causes; 13, 31, 43 and others come from faulty programs.
https://docs.nvidia.com/deploy/xid-errors/"""
RESET_XIDS = frozenset({79, 119, 120})
"""After these only a restart of the machine helps."""


def throttling(options: Options) -> Finding:
    """Whether heat or the power supply slows a GPU right now."""
    del options
    return judge_throttling(read_cards())


def judge_throttling(cards: Sequence[Card]) -> Finding:
    """What the clock event reasons mean. A power cap under load is no fault; see `judge_clocks` for lowered ones."""
    if not cards:
        return Finding(THROTTLING, "skip", NO_GPU)
    hot, weak = [], []
    for card in cards:
        reasons = card.slowed_by or 0
        if reasons & SLOWED_BY_HEAT:
            hot.append(card)
        elif reasons & (SLOWED_BY_SUPPLY | SLOWED_BY_HARDWARE):
            weak.append(card)
    if hot or weak:
        stories = [f"{card.label} is slowed by heat{_degrees(card)}" for card in hot]
        stories += [f"{card.label} is slowed by its power supply{_degrees(card)}" for card in weak]
        where = ",".join(card.bus for card in (*hot, *weak))
        look = "fans, dust, air in the case" if hot else "power cables and supply"
        mend = f"nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE -i {where}   # then: {look}"
        return Finding(THROTTLING, "warn", "; ".join(stories), "no GPU slowed by heat or power supply", mend)
    warmest = max((card.temperature_c for card in cards if card.temperature_c is not None), default=None)
    return Finding(THROTTLING, "ok", "none is slowed" + (f", the warmest has {warmest} °C" if warmest else ""))


def clocks(options: Options) -> Finding:
    """Whether somebody has lowered the power or the clocks of a GPU."""
    del options
    return judge_clocks(read_cards())


def judge_clocks(cards: Sequence[Card]) -> Finding:
    """What power limits and clock settings mean."""
    if not cards:
        return Finding(CLOCKS, "skip", NO_GPU)
    stories, mends = [], []
    for card in cards:
        limit, usual = card.power_limit_w, card.power_default_w
        if limit is not None and usual and limit < LOW_POWER_FRACTION * usual:
            stories.append(f"{card.label} is capped at {limit:.0f} of {usual:.0f} W")
            mends.append(f"sudo nvidia-smi -i {card.bus} -pl {usual:.0f}")
        clock, usual_clock = card.clock_mhz, card.clock_default_mhz
        lowered = clock is not None and usual_clock is not None and clock < usual_clock
        if lowered:
            stories.append(f"{card.label} is set to {clock} MHz, {usual_clock} MHz are usual")
        elif (card.slowed_by or 0) & SLOWED_BY_SETTING:
            stories.append(f"{card.label} has its clocks held by a setting")
            lowered = True
        if lowered:
            mends.append(f"sudo nvidia-smi -i {card.bus} -rgc && sudo nvidia-smi -i {card.bus} -rac")
    if stories:
        expected = "the power limit and clocks that the GPUs come with"
        return Finding(CLOCKS, "warn", "; ".join(stories), expected, " && ".join(mends))
    watts = [f"{card.power_limit_w:.0f} W" for card in cards if card.power_limit_w is not None]
    return Finding(CLOCKS, "ok", ", ".join(watts) + " as they come" if watts else "the driver tells of no limits")


def links(options: Options) -> Finding:
    """Whether each GPU has all its lanes to the host, and its NVLinks."""
    del options
    return judge_links(read_cards())


def judge_links(cards: Sequence[Card]) -> Finding:
    """What lanes and links mean. A lane's speed falls when a GPU idles and says nothing; their number doesn't."""
    if not cards:
        return Finding(LINKS, "skip", NO_GPU)
    narrow = [
        card
        for card in cards
        if card.width is not None and card.width_max and card.width * NARROW_FACTOR <= card.width_max
    ]
    broken = [card for card in cards if any(card.nvlinks) and not all(card.nvlinks)]
    stories = [f"{card.label} has {card.width} of {card.width_max} PCIe lanes" for card in narrow]
    stories += [f"{card.label} has {sum(card.nvlinks)} of {len(card.nvlinks)} NVLinks up" for card in broken]
    if narrow:
        where = narrow[0].bus
        mend = f"sudo lspci -vv -s {where} | grep -E 'LnkCap|LnkSta'   # then: another slot, no riser, the BIOS's lanes"
        return Finding(LINKS, "warn", "; ".join(stories), "all lanes of a slot made for GPUs", mend)
    if broken:
        mend = f"nvidia-smi nvlink --status -i {broken[0].bus}   # then: the bridge between the GPUs, or a restart"
        return Finding(LINKS, "warn", "; ".join(stories), "all NVLinks of a GPU up, or none", mend)
    spelled = [
        f"cuda:{card.index} x{card.width}" + (f" and {sum(card.nvlinks)} NVLinks" if any(card.nvlinks) else "")
        for card in cards
        if card.width is not None
    ]
    return Finding(LINKS, "ok", "PCIe " + ", ".join(spelled) if spelled else "the driver tells of no lanes")


def errors(options: Options) -> Finding:
    """Whether a GPU has had faults of its hardware since the machine was started."""
    cards = read_cards()
    return judge_errors(cards, read_xids(options.root_path) if cards else ())


def judge_errors(cards: Sequence[Card], xids: Sequence[tuple[str, int]] | None) -> Finding:
    """What memory errors and the driver's complaints mean.

    Args:
        cards: the GPUs.
        xids: (bus, number) of each complaint in the kernel's log; None where the log can't be read.
    """
    if not cards:
        return Finding(ERRORS, "skip", NO_GPU)
    expected = "no uncorrected memory errors, no Xid of hardware since the start"
    lost = [card for card in cards if card.is_row_lost]
    if lost:
        found = "; ".join(f"{card.label} has faulty memory that can't be replaced any more" for card in lost)
        rest = ",".join(str(card.index) for card in cards if card not in lost)
        mend = f"evenload run -d {rest or 'cpu'} train.py   # and have the GPU exchanged"
        return Finding(ERRORS, "fail", found, expected, mend)
    stories, worn = [], []
    for card in cards:
        if card.ecc_errors:
            stories.append(f"{card.label} has had {card.ecc_errors} uncorrected memory errors")
            worn.append(card.bus)
        elif card.is_row_pending:
            stories.append(f"{card.label} has faulty memory that a reset would replace")
            worn.append(card.bus)
    places = {card.bus.rpartition(".")[0]: card for card in cards}
    bad = {(bus, xid): None for bus, xid in xids or () if xid in HARDWARE_XIDS}
    for bus, xid in bad:
        known = places.get(bus.lower())
        stories.append(f"Xid {xid} ({HARDWARE_XIDS[xid]}) of {known.label if known else bus}")
        worn.append(bus + ".0")
    if stories:
        reset = f"sudo nvidia-smi --gpu-reset -i {','.join(dict.fromkeys(worn))}   # while nothing runs on it"
        restart = any(xid in RESET_XIDS for _, xid in bad)
        return Finding(ERRORS, "warn", "; ".join(stories), expected, "sudo reboot" if restart else reset)
    log = "" if xids is not None else "; the kernel's log can't be read by this user"
    return Finding(ERRORS, "ok", f"none told by {len(cards)} GPU(s){log}")


def read_xids(root: Path) -> tuple[tuple[str, int], ...] | None:
    """The driver's complaints (bus, number) in the kernel's log of this start; None where this user may not read it."""
    log = _kernel_log(root / "dev/kmsg")
    if log is None and (journal := shutil.which("journalctl")) and root == Path("/"):
        command = [journal, "--dmesg", "--boot", "--output=cat", "--grep=NVRM: Xid", "--quiet"]
        try:
            log = subprocess.run(command, capture_output=True, text=True, timeout=3).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    if log is None:
        return None
    return tuple((bus.lower(), int(xid)) for bus, xid in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", log))


def _kernel_log(path: Path) -> str | None:
    """All records of the kernel's ring buffer, without waiting for more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    parts = []
    try:
        while True:
            try:
                block = os.read(file, 1 << 16)  # one record a read
            except BrokenPipeError:
                continue  # the oldest was overwritten meanwhile
            if not block:
                break
            parts.append(block)
    except BlockingIOError:
        pass  # the newest has been read
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(parts).decode(errors="replace")


def _degrees(card: Card) -> str:
    if card.temperature_c is None:
        return ""
    limit = f", it slows at {card.slowdown_c} °C" if card.slowdown_c else ""
    return f" ({card.temperature_c} °C{limit})"
