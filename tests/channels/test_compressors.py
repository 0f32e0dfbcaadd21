"""Compressors: what travels, what arrives, and how much may be missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from channel_lists import untried

import holdfast as hf
from holdfast.channels.bits import pack, pack_positions, unpack, unpack_positions
from holdfast.channels.compressor import Compressor
from holdfast.contract.channel import CHANNELS, Draw
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, row_bits
from holdfast.engines.common.channel_run import wire_like

COMPRESSORS: list[Compressor] = [
    hf.TopK(0.05),
    hf.TopK(0.6),
    hf.RandomK(0.1),
    hf.LowRank(3),
    hf.LowRank(2, columns=7),
    hf.Half(feedback=True),
    hf.BFloat16(feedback=True),
    *(kind(bits) for kind in (hf.Uniform, hf.Natural) for bits in (1, 2, 4, 8)),
    hf.Uniform(4, block=32, dithered=True),
    hf.Natural(4, dithered=True),
    hf.chain(hf.TopK(0.05), hf.Uniform(8)),
    hf.chain(hf.TopK(0.2), hf.RandomK(0.5), hf.Natural(4)),
    hf.chain(hf.LowRank(2), hf.Half()),
]


def test_every_compressor_is_tried():
    missing = {name for name in untried(COMPRESSORS) if issubclass(CHANNELS[name], Compressor)}
    assert not missing, "add it to COMPRESSORS of this file"


RANDOM = (hf.RandomK, hf.LowRank)  # delta holds on average over the draws
every_compressor = pytest.mark.parametrize("channel", COMPRESSORS, ids=repr)


def rows(m: int, d: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, d, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(m)[:, None]


def through(channel: Compressor, x: torch.Tensor, nodes: torch.Tensor, round: int = 5) -> torch.Tensor:
    return channel.decode(channel.encode(x, (), Draw(3, round, 1, nodes)), x)


@every_compressor
@pytest.mark.parametrize("d", [1, 2, 7, 300])
def test_a_row_travels_alike_whatever_rows_are_beside_it(channel, d):
    """Bit for bit, so that a deployed node sends what the simulator computes for it."""
    x, nodes = rows(5, d), torch.arange(5)
    together = channel.encode(x, (), Draw(3, 5, 1, nodes))
    for i in range(5):
        alone = channel.encode(x[i : i + 1].clone(), (), Draw(3, 5, 1, nodes[i : i + 1]))
        for all_rows, row in zip(leaves(together), leaves(alone), strict=True):
            assert torch.equal(all_rows[i : i + 1], row)
        assert torch.equal(channel.decode(alone, x[:1])[0], channel.decode(together, x)[i])


@every_compressor
@pytest.mark.parametrize("d", [1, 2, 7, 300])
def test_no_more_is_missing_than_delta_says(channel, d):
    x = rows(4, d)
    missing = torch.stack([(through(channel, x, torch.arange(4), r) - x).square().sum(1) for r in range(40)])
    share = missing / x.square().sum(1)
    assert 0 < channel.delta(d) <= 1
    first = channel.parts[0] if isinstance(channel, hf.Chain) else channel
    on_average = (
        isinstance(first, RANDOM) or getattr(channel, "dithered", False) or isinstance(channel, hf.Chain)
    )
    if on_average:
        assert share.mean(0).max() <= 1 - channel.delta(d) + 0.05
    else:
        assert share.max() <= 1 - channel.delta(d) + 1e-12


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", [hf.Uniform, hf.Natural])
def test_delta_of_quantisers_is_the_worst_case(kind, bits):
    """One large entry, and the others so small that they are all rounded to nothing, or off by the most."""
    channel = kind(bits, block=64)
    levels = channel.levels
    small = 0.4999 / levels if kind is hf.Uniform else 0.4999 * 2.0 ** (1 - levels)
    x = torch.full((1, 64), small, dtype=torch.float64)
    x[0, 0] = 1.0
    missing = float(
        (through(channel, x, torch.zeros(1, dtype=torch.int64)) - x).square().sum() / x.square().sum()
    )
    tight = (
        kind is hf.Uniform or bits == 2
    )  # of Natural, a third of a number is more than that of all small ones
    assert missing <= 1 - channel.delta(64) + 1e-12
    assert not tight or missing > (1 - channel.delta(64)) * 0.99


@every_compressor
def test_zeros_arrive_as_zeros_and_wires_have_one_shape(channel):
    zeros = torch.zeros(3, 40, dtype=torch.float32)
    assert torch.equal(through(channel, zeros, torch.arange(3)), zeros)
    wire = channel.encode(rows(3, 40).float(), (), Draw(0, 0, 0, torch.arange(3)))
    expected = wire_like(channel, zeros)
    assert [(t.shape, t.dtype) for t in leaves(wire)] == [(t.shape, t.dtype) for t in leaves(expected)]


@pytest.mark.parametrize(
    "channel", [hf.Uniform(4, block=16, dithered=True), hf.Natural(4, dithered=True)], ids=repr
)
def test_random_rounding_is_right_on_average(channel):
    x = rows(1, 16)
    mean = through(channel, x.expand(4000, -1), torch.arange(4000)).mean(0)
    assert (mean - x).abs().max() < 0.02 * x.abs().max()


def test_random_entries_differ_between_rounds_nodes_and_parts_of_a_message():
    channel, x = hf.RandomK(0.5), torch.ones(2, 64)
    here, later = (through(channel, x, torch.arange(2), r) for r in range(2))
    assert not torch.equal(here, later)
    assert not torch.equal(here[0], here[1])
    first, second = channel.decode(channel.encode((x, x), (), Draw(0, 0, 0, torch.arange(2))), (x, x))
    assert not torch.equal(first, second)
    assert (here.sum(1) == 32).all()


def test_bits_that_travel():
    """Of 1,000 numbers in float32."""
    like = torch.empty(1, 1000)

    def bits(channel: Compressor) -> int:
        return row_bits(wire_like(channel, like))

    elias_fano = 8 * -(-50 * 4 // 8) + 8 * -(-(999 // 16 + 50) // 8)  # 4 low bits each, then 62 + 50 marks
    assert bits(hf.TopK(0.05)) == 50 * 32 + elias_fano
    assert bits(hf.TopK(0.6)) == 600 * 32 + 1000  # a mark for every entry
    assert bits(hf.RandomK(0.1)) == 100 * 32 + 32  # and a key
    assert bits(hf.LowRank(2)) == 2 * (31 + 33) * 32
    assert bits(hf.Half(feedback=True)) == 16 * 1000 + 32
    assert bits(hf.BFloat16(feedback=True)) == 16 * 1000
    for kind in (hf.Uniform, hf.Natural):
        for width in (1, 4, 8):
            assert bits(kind(width)) == width * 1000 + 4 * 32  # four blocks
    assert bits(hf.chain(hf.TopK(0.05), hf.Uniform(8))) == 50 * 8 + 32 + elias_fano
    assert bits(hf.chain(hf.LowRank(2), hf.Half())) == 2 * (31 + 33) * 16 + 32


@pytest.mark.parametrize("bits", range(1, 14))
def test_packing(bits):
    codes = torch.arange(45).view(3, 15) * 997 % 2**bits
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, -(-15 * bits // 8))
    assert torch.equal(unpack(packed, bits, 15), codes)


@pytest.mark.parametrize(
    ("d", "k"), [(1, 1), (2, 1), (9, 9), (10, 3), (100, 1), (1000, 10), (1000, 400), (5000, 77)]
)
def test_positions(d, k):
    generator = torch.Generator().manual_seed(d + k)
    chosen = [torch.randperm(d, generator=generator)[:k].sort().values for _ in range(4)]
    ends = [torch.arange(k), torch.arange(d - k, d)]
    positions = torch.stack(chosen + ends)
    assert torch.equal(unpack_positions(pack_positions(positions, d), d, k), positions)


def test_bits_that_nobody_honest_sends_stay_within_the_vector():
    channel, x = hf.TopK(0.1), rows(2, 100)
    wire = channel.encode(x, (), Draw(0, 0, 0, torch.arange(2)))
    for byte in (0, 255, 0b10101010):
        bad = wire._replace(places=type(wire.places)(*(torch.full_like(t, byte) for t in wire.places)))
        assert channel.decode(bad, x).isfinite().all()
    drawn = hf.RandomK(0.1).encode(x, (), Draw(0, 0, 0, torch.arange(2)))
    assert hf.RandomK(0.1).decode(drawn._replace(key=torch.full_like(drawn.key, -1)), x).isfinite().all()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hf.TopK(0), r"^TopK.share: "),
        (lambda: hf.TopK(0.1, gamma=0), r"^TopK.gamma: "),
        (lambda: hf.TopK(0.1, gamma="best"), r"^TopK.gamma: "),
        (lambda: hf.TopK(0.1, gamma=0.5, feedback=False), r"^TopK.gamma: it is the step of error feedback"),
        (
            lambda: hf.Half(gamma=0.5),
            r"^Half.gamma: it is the step of error feedback, got 0.5 without; .*feedback",
        ),
        (lambda: hf.Uniform(9), r"^Uniform.bits: "),
        (lambda: hf.Uniform(1, dithered=True), r"^Uniform.dithered: one bit holds a sign"),
        (
            lambda: hf.Uniform(3, dithered=True),
            r"^Uniform.dithered: with 3 bits, random .* smaller blocks or more",
        ),
        (lambda: hf.chain(hf.TopK(0.1)), r"^Chain.steps: "),
        (lambda: hf.chain(hf.Uniform(4), hf.TopK(0.1)), r"Uniform leaves no numbers .*; put Uniform last"),
        (lambda: hf.chain(hf.LowRank(2), hf.Uniform(4)), r"Uniform after LowRank would spoil"),
        (lambda: hf.chain(hf.TopK(0.1, gamma=0.5), hf.Half()), r"TopK.gamma: a chain has one gamma"),
        (lambda: hf.chain(hf.Identity(), hf.Half()), r"Chain: Identity compresses nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(make, reason):
    with pytest.raises(HoldfastError, match=reason):
        make()


@every_compressor
def test_a_channel_is_named_in_a_file_as_it_is_in_python(channel):
    names = {CHANNELS[name]: name for name in CHANNELS}

    def table(made: Compressor) -> dict:
        given = {key: value for key, value in vars(made).items() if key != "parts"}
        if isinstance(made, hf.Chain):
            given["steps"] = [table(step) for step in made.steps]
        return {"name": names[type(made)]} | given

    built = CHANNELS.chosen(table(channel))
    assert built == channel
    assert replace(built, gamma="tuned", feedback=True) != channel
