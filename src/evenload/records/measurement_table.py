"""The table of a measurement by alternating windows, for people."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.records.measurement import EVEN, EVENLOAD, STATIC, Arms, Estimate

_TITLES = {EVEN: "equal shares", EVENLOAD: "Evenload"}


def arms_table(found: Arms, devices: Sequence[str] = (), throttle: Sequence[float] = ()) -> str:
    """Some lines: each arm's speed, and as a part of the sum of the devices' speeds alone.

    Args:
        found: the result.
        devices: what a person calls the device of each rank.
        throttle: the speeds that were asked for, one a rank; empty: nobody was slowed.
    """
    total = found.solo_sum
    rows = [
        (
            f"rank {rank} alone" + (f", {devices[rank]}" if rank < len(devices) else ""),
            "",
            speed,
            speed.value / total.value if total is not None else None,
        )
        for rank, speed in enumerate(found.solo)
    ]
    if total is not None:
        rows.append(("sum of these", "", total, 1.0))
    for arm, speed in found.speeds.items():
        title = _TITLES.get(arm, "fixed shares" if arm.startswith(STATIC) else arm)
        part = found.of_sum[arm].value if arm in found.of_sum else None
        rows.append((title, " + ".join(map(str, found.shares[arm])), speed, part))
    width = max(len(title) for title, *_ in rows)
    shares_width = max(len("shares"), *(len(shares) for _, shares, *_ in rows))
    lines = [f"{'':{width}}  {'shares':>{shares_width}}  samples/s" + ("  of the sum" if total is not None else "")]
    for title, shares, speed, part in rows:
        end = f"  {part * 100:8.1f} %" if part is not None else ""
        lines.append(f"{title:{width}}  {shares:>{shares_width}}  {speed.value:9.4g}{end}")
    for what, ratio in (
        ("Evenload over equal shares", found.over_even),
        ("Evenload over the best device alone", found.over_best_alone),
        (
            f"Evenload over the best fixed split ({(found.best_static or '').removeprefix(STATIC)})",
            found.over_best_static,
        ),
    ):
        if ratio is not None:
            lines.append(f"{what}: {times(ratio)}")
    if found.efficiency is not None:
        lines.append(f"efficiency, Evenload over the sum: {percent(found.efficiency)}")
    if len(throttle) == len(found.solo) > 1 and any(factor != 1 for factor in throttle):
        asked = ":".join(f"{factor / throttle[0]:.4g}" for factor in throttle)
        got = ":".join(f"{speed.value / found.solo[0].value:.3f}" for speed in found.solo)
        lines.append(f"speeds asked of the throttle {asked}, delivered {got}")
    return "\n".join(line for line in lines if line)


def times(ratio: Estimate) -> str:
    """``1.47 times (1.46 to 1.48)``."""
    return f"{ratio.value:.3g} times ({ratio.low:.3g} to {ratio.high:.3g})"


def percent(ratio: Estimate) -> str:
    """``97.1 % (96.8 to 97.4)``."""
    return f"{ratio.value * 100:.1f} % ({ratio.low * 100:.1f} to {ratio.high * 100:.1f})"
