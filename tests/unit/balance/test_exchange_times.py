"""Predicted times of exchanges, their bytes, bucket sizes, and the choice of a format."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenload.balance.exchange_times import (
    BucketSizes,
    Link,
    Work,
    as_measured,
    async_option,
    bucket_sizes,
    cheapest,
    describe,
    describe_exchange,
    local_options,
    options_of,
    wire_options,
    without_exchange,
)
from evenload.balance.wire_bytes import FORMATS, GradientSize, payload_bytes, sent_bytes
from evenload.balance.wire_choice import ObservedGradients, choose_wire, noise_square

SIZE = GradientSize(8_000_000, 4, ((2000, 2000), (2000, 2000)))
SLOW = Link(0.04, 12.5e6, 12.5e6, 12.5e6)
FAST = Link(2e-5, 1.25e9, 1.25e9, 1.25e9)


def test_bytes_of_each_format() -> None:
    assert payload_bytes("fp32", SIZE) == 32e6
    assert payload_bytes("bf16", SIZE) == 16e6
    assert payload_bytes("fp16", SIZE) == 16e6 + 8e6 * 4 / 1024
    assert payload_bytes("int8", SIZE) == 8e6 + 8e6 * 4 / 1024
    assert payload_bytes("powersgd", SIZE) == 4 * 2 * 4 * 4000  # both matrices, nothing else
    assert payload_bytes("powersgd", GradientSize(15, 4, ((3, 5),))) == 60  # too small to shrink
    assert sent_bytes("fp32", SIZE, 2) == 32e6
    assert sent_bytes("fp32", SIZE, 4) == 48e6


def test_a_slow_link_makes_the_smallest_format_the_cheapest_and_fp32_the_exact_one() -> None:
    options = wire_options(SIZE, SLOW, 2, Work(0.5))
    assert {option.setting for option in options} == {f'wire="{name}"' for name in FORMATS}
    by_name = dict(zip(FORMATS, options, strict=True))
    # 32 MB at 12.5 MB/s and a latency. The first of two buckets leaves in the middle of the backward, which takes 2/3 of 0.5 s.
    assert by_name["fp32"].exchange_s == pytest.approx(2.56 + 0.04)
    assert by_name["fp32"].step_s == pytest.approx(0.5 + 2.6 - 0.5 / 3)
    assert cheapest(options, exact=True) is by_name["fp32"]
    assert cheapest(options, exact=False) is by_name["powersgd"]
    assert describe(options)[-1] == 'cheapest: wire="fp32" with the exact result (2.93 s), wire="powersgd" at all (' + (
        f"{by_name['powersgd'].step_s:.3g} s)"
    )


def test_before_the_first_step_the_cheapest_exchanges_are_named() -> None:
    text = describe_exchange(options_of(SIZE, SLOW, 2, Work(0.0)))
    assert text.startswith('wire="fp32" 2.6 s, wire="bf16" 1.3 s, ')
    assert text.endswith(
        '. Cheapest with the exact result: wire="fp32"; cheapest at all: strategy="local", sync_every=20, wire="int8"'
    )


def test_on_a_fast_link_the_backward_hides_all_but_the_last_bucket() -> None:
    fp32, *_, int8, _ = wire_options(SIZE, FAST, 2, Work(0.5, codec_s_per_value={"int8": 8e-9}))
    assert fp32.step_s == pytest.approx(0.5 + 16e6 / 1.25e9, rel=0.01)
    assert fp32.step_s < int8.step_s  # encoding costs more than the bytes
    assert cheapest([fp32, int8], exact=False) is fp32


def test_on_a_cpu_the_backward_does_not_hide_what_encodes() -> None:
    link, costs = Link(1e-3, 125e6, 125e6, 125e6), {"int8": 8e-9}
    small = GradientSize(1_000_000, 4, ((512, 512),) * 4)
    on_gpu, on_cpu = (
        cheapest(
            wire_options(small, link, 2, Work(0.1, 1, costs, encodes_on_cpu=is_cpu), ["fp32", "int8"]), exact=False
        ).setting
        for is_cpu in (False, True)
    )
    assert (on_gpu, on_cpu) == ('wire="int8"', 'wire="fp32"')


def test_a_sum_that_copies_on_the_cores_that_compute_hides_little() -> None:
    # 32 MB in 25.6 ms and a latency; the first of two buckets leaves in the middle of a backward of 2/3 of 0.1 s.
    half, whole = replace(FAST, lost_s_per_byte=0.5 / 1.25e9), replace(FAST, lost_s_per_byte=1 / 1.25e9)
    free, shared, none = (wire_options(SIZE, one, 2, Work(0.1), ["fp32"])[0].step_s for one in (FAST, half, whole))
    assert free == pytest.approx(0.1 + 0.0128, rel=0.01)
    assert shared == pytest.approx(0.1 + 0.0128 + 0.0064, rel=0.01)
    assert none == pytest.approx(0.1 + 0.0256, rel=0.01)
    # More than the backward hides: it hides all that it can, and all of that lasts longer.
    slow = replace(SLOW, lost_s_per_byte=0.1 / 12.5e6)
    assert wire_options(SIZE, slow, 2, Work(0.5), ["fp32"])[0].step_s == pytest.approx(0.5 + 2.6 - 0.5 / 3)


def test_what_steps_with_an_exchange_took_gives_what_they_compute_without() -> None:
    link = replace(FAST, lost_s_per_byte=0.5 / 1.25e9)
    # Threads that compute waited for a processor: of that, sums had it for 12.8 ms, or 3.2, at most. A codec is computation.
    for wire, codec_s, delay_s, lost_s in (
        ("fp32", 0.0, 0.0, 0.0),
        ("fp32", 0.0, 0.005, 0.005),
        ("fp32", 0.0, 0.3, 0.0128),
        ("int8", 0.064, 0.3, 0.0032),
    ):
        work = Work(0.5 + codec_s + lost_s, 1, {"int8": 8e-9}, encodes_on_cpu=True)
        found = without_exchange(work, wire, SIZE, link, 2, delay_s)
        assert found.compute_s == pytest.approx(0.5, rel=1e-3)
    on_gpu = Work(0.5, 1, {"int8": 8e-9})
    assert without_exchange(on_gpu, "int8", SIZE, FAST, 2, 0.3) == on_gpu
    # However much is said to be lost, some of it was computation.
    assert without_exchange(
        Work(0.03, 1, {"int8": 8e-9}, encodes_on_cpu=True), "int8", SIZE, link, 2, 0.3
    ).compute_s == pytest.approx(0.01)


def test_the_format_in_use_takes_what_was_measured_and_the_others_follow() -> None:
    work = Work(0.5)
    # A link that is slower than measured: the rest is that of the bytes, after a round trip of 20 ms for the rows of control,
    # which all formats need. Cores that wait for each other: all formats wait.
    for link, taken_s in ((SLOW, 0.02 + 0.5 * 0.08), (replace(FAST, lost_s_per_byte=1 / 1.25e9), 0.1)):
        options = options_of(SIZE, link, 2, work)
        fp32, bf16 = options[:2]
        rest_s = min(0.1, fp32.step_s - work.compute_s)
        found = as_measured(options, "fp32", SIZE, link, 2, work, fp32.step_s + rest_s)
        assert found[0].step_s == pytest.approx(fp32.step_s + rest_s)
        assert found[1].step_s == pytest.approx(bf16.step_s + taken_s * rest_s / 0.1, rel=0.01)
        # What islands send takes longer as far as the link does; the rows of control don't wait behind it.
        more_s = 0.08 / 20 if link is SLOW else 0.0
        assert found[5].step_s == pytest.approx(options[5].step_s + more_s, abs=2e-6)
        assert found[5].exchange_s == pytest.approx(options[5].exchange_s + more_s, abs=2e-6)
        bounded = as_measured(options, "fp32", SIZE, link, 2, work, 100.0)[0]
        assert bounded.step_s == pytest.approx(2 * fp32.step_s - 0.5)
        # A link that is three times as fast as measured: the sums of all formats are.
        faster_s = 0.5 + (fp32.step_s - 0.5) / 3
        found = as_measured(options, "fp32", SIZE, link, 2, work, faster_s)
        assert found[0].step_s == pytest.approx(faster_s)
        assert found[1].step_s < bf16.step_s


@pytest.mark.parametrize("faster", [0.5, 2.0])
def test_after_a_machine_has_left_nothing_is_sent(faster: float) -> None:
    options = options_of(SIZE, SLOW, 1, Work(0.5))
    found = as_measured(options, "fp32", SIZE, SLOW, 1, Work(0.5), faster * options[0].step_s)
    assert [one.setting for one in found] == [one.setting for one in options]


def test_a_large_first_parameter_travels_alone_after_the_backward() -> None:
    link = Link(1e-4, 1e9, 1e9, 1e9)
    embedding, layers = (50_000, 160), ((1000, 1000),) * 8
    first, last = (
        wire_options(GradientSize(16_000_000, 4, shapes), link, 2, Work(1.0), ["fp32"])[0].step_s
        for shapes in ((embedding, *layers), (*layers, embedding))
    )
    assert first == pytest.approx(1 + 0.032, rel=0.01)
    assert last == pytest.approx(1 + 0.004, rel=0.01)


def test_several_micro_batches_hide_less() -> None:
    one, four = (wire_options(SIZE, SLOW, 2, Work(0.5, num_micro=n), ["fp32"])[0].step_s for n in (1, 4))
    assert four - one == pytest.approx(0.5 / 3 * 3 / 4)


def test_islands_exchange_once_in_sync_every_steps() -> None:
    once, fragments, int8 = local_options(SIZE, SLOW, 2, Work(0.5), 20)
    # 2.56 s of bytes, and a latency of the sum; what islands report travels beside two steps.
    assert once.step_s == pytest.approx(0.5 + (2.56 + 0.04) / 20)
    assert once.sent_bytes == 32e6 / 20
    assert (fragments.step_s, fragments.is_exact) == (0.5, False)
    assert int8.step_s < once.step_s
    assert local_options(SIZE, SLOW, 2, Work(0.01), 20)[1].step_s == pytest.approx((2.56 + 4 * 0.04 + 0.02) / 20)
    assert len(local_options(SIZE, SLOW, 2, Work(0.5), 1)) == 1


def test_async_workers_on_other_machines_fetch_and_send_everything() -> None:
    far = 1.0 + 2 * 2.56 + 0.04
    work = Work(0.5, whole_batch_s=(1.0, 1.0), is_far=(False, True))
    found = async_option(SIZE, SLOW, work)
    assert found is not None and found.step_s == pytest.approx(far)
    work = Work(0.5, whole_batch_s=(1.0, 1.0, 1.0), is_far=(False, False, True))
    found = async_option(SIZE, SLOW, work)
    assert found is not None and found.step_s == pytest.approx(1 / (1 + 1 / far))
    assert async_option(SIZE, SLOW, Work(0.5)) is None
    assert async_option(SIZE, SLOW, Work(0.5, whole_batch_s=(1.0,), is_far=(False,))) is None
    settings = [one.setting for one in options_of(SIZE, SLOW, 2, work, 20)]
    assert settings[-1] == 'strategy="async"' and len(settings) == len(FORMATS) + 4


def test_bucket_sizes_balance_latency_against_the_last_bucket() -> None:
    sizes = bucket_sizes(SIZE, SLOW, 2)
    assert sizes.other_bytes == pytest.approx((32e6 * 0.04 * 12.5e6) ** 0.5)
    assert sizes.first_bytes == pytest.approx(0.04 * 12.5e6)

    def cost(size: float) -> float:
        return 32e6 / size * SLOW.latency_s + size / SLOW.bytes_per_s

    assert all(cost(sizes.other_bytes) <= cost(sizes.other_bytes * factor) for factor in (0.5, 0.9, 1.1, 2))
    # A format with a quarter of the bytes has a link that is four times as fast.
    assert bucket_sizes(SIZE, SLOW, 2, "int8").other_bytes == pytest.approx(2 * sizes.other_bytes, rel=0.01)
    assert bucket_sizes(GradientSize(0), SLOW, 2) == BucketSizes(1 << 18, 1 << 18)


def test_variance_of_a_sum_from_its_parts() -> None:
    # Two ranks with 3 and 1 samples of mean 0 and variance 1: E|g_r|² = n_r, E|g|² = 4.
    assert noise_square((3, 1), 4.0, 4.0) == pytest.approx(4.0)
    # Equal gradients of all samples, without noise: |g_r|² = n_r².
    assert noise_square((3, 1), 10.0, 16.0) == 0.0
    assert noise_square((4, 0), 16.0, 16.0) == 0.0


def test_auto_takes_the_fastest_format_that_disappears_in_the_noise() -> None:
    options = dict(zip(FORMATS, wire_options(SIZE, SLOW, 2, Work(0.5)), strict=True))
    lost = {"bf16": 1e-5, "fp16": 1e-7, "int8": 1e-4}
    assert choose_wire(ObservedGradients(1.0, 0.5, lost), options)[0] == "int8"
    assert choose_wire(ObservedGradients(1.0, 0.005, lost), options)[0] in ("bf16", "fp16")
    name, why = choose_wire(ObservedGradients(1.0, 1e-6, {"bf16": 1e-5}), options)
    assert name == "fp32" and "variance" in why
    name, why = choose_wire(ObservedGradients(1.0, 0.0, lost), options)
    assert name == "fp32" and "not known" in why
    fast = dict(zip(FORMATS, wire_options(SIZE, FAST, 2, Work(0.5)), strict=True))
    name, why = choose_wire(ObservedGradients(1.0, 0.5, lost), fast)
    assert name == "fp32" and "would not shorten" in why
