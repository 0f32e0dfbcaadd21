"""Matrices of lower rank than the channel sends: a column that is only rounding noise is dropped."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.contract.channel import Draw


def missing(channel: hf.LowRank, x: torch.Tensor, rounds: int = 40) -> torch.Tensor:
    """[rounds, m]: the share of every row of ``x`` [m, d] that does not arrive."""
    nodes = torch.arange(len(x))
    arrived = [channel.decode(channel.encode(x, (), Draw(3, r, 1, nodes)), x) for r in range(rounds)]
    return torch.stack([(got - x).square().sum(1) for got in arrived]) / x.square().sum(1)


def of_rank(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[4, rows * columns]: matrices of that rank, the first of small whole numbers, the others random."""
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(4, rows, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(4, rank, columns, generator=generator, dtype=torch.float64)
    left[0], right[0] = left[0].sign(), right[0].sign()
    return (left @ right).to(dtype).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_a_matrix_of_equal_numbers_arrives_whole(rank, dtype):
    assert missing(hf.LowRank(rank), torch.ones(1, 64, dtype=dtype)).max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_matrix_of_no_higher_rank_arrives_whole(rank, more, dtype):
    x = of_rank(rank, 12, 10, dtype)
    assert missing(hf.LowRank(rank + more, columns=10), x).max() < 1e-8


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e30])
def test_rows_may_be_so_small_or_large_that_their_squares_are_not_numbers(size):
    x = size * of_rank(2, 8, 8, torch.float32)
    nodes, channel = torch.arange(len(x)), hf.LowRank(3)
    got = channel.decode(channel.encode(x, (), Draw(3, 5, 1, nodes)), x)
    assert (got / size - x / size).abs().max() < 1e-4


def test_rows_of_zeros_arrive():
    x = torch.zeros(2, 64)
    channel = hf.LowRank(3)
    assert torch.equal(channel.decode(channel.encode(x, (), Draw(3, 5, 1, torch.arange(2))), x), x)


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("topology", ["server", "ring"])
def test_models_of_equal_numbers_converge(rank, topology):
    """f_i = |x - i 1|^2 / 2: every message is a multiple of ones, a matrix of rank one."""
    functions = [lambda x, i=i: 0.5 * (x - i).square().sum() for i in range(4)]
    method = hf.FedAvg(lr=0.1, local_steps=2) if topology == "server" else hf.LED(lr=0.1, local_steps=2)
    result = hf.minimize(
        functions, torch.zeros(64), method, rounds=300, topology=topology, channel=hf.LowRank(rank)
    )
    assert (result.x[-1] - 1.5).abs().max() < 1e-3
