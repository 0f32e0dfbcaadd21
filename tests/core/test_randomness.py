from __future__ import annotations

from collections import Counter

import pytest
import torch
from devices import on_gpu
from scipy.stats import chi2
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream, batch_indices, cohort, coin, philox, uniform

ONES = 0xFFFFFFFF

# Known answers of philox4x32_10, published with the Random123 library (kat_vectors): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def chi_square_p(observed: torch.Tensor) -> float:
    """P-value of equal frequencies."""
    expected = observed.sum() / observed.numel()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic.item(), observed.numel() - 1))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter, key, words):
    assert philox(counter, key).tolist() == list(words)
    assert philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key))).tolist() == list(words)


def test_philox_broadcasts():
    counters = torch.tensor([counter for counter, _, _ in KNOWN])
    keys = torch.tensor([key for _, key, _ in KNOWN])
    assert philox(tuple(counters.T), tuple(keys.T)).tolist() == [list(words) for _, _, words in KNOWN]
    assert philox((torch.arange(3), 0, torch.arange(2)[:, None], 0), (0, 0)).shape == (2, 3, 4)


def test_one_operation_draws_the_same_words_as_many():
    """On a GPU, philox is one operation; here it is called on a CPU."""
    keys = torch.tensor([[1, 2, 3, 4], [5, ONES, 7, ONES], [0, 0, 0, 9]])

    def one(key):
        seed, node, round, step = key.unbind()
        return torch.ops.holdfast.philox([torch.arange(5), step, round, node, seed], ONES, 7)

    def many(key):
        seed, node, round, step = key.unbind()
        return philox((torch.arange(5), step, round, node), (seed, ONES), rounds=7)

    assert torch.equal(vmap(one)(keys), vmap(many)(keys))
    nodes, steps = torch.arange(3)[:, None], torch.arange(2)[:, None, None]
    words = torch.ops.holdfast.philox(
        [torch.arange(4), steps, torch.tensor(3), nodes, torch.tensor(9)], 1, 10
    )
    assert torch.equal(words, philox((torch.arange(4), steps, 3, nodes), (9, 1)))


def test_philox_takes_32_bit_words_only():
    with pytest.raises(HoldfastError, match=r"\[0, 2\*\*32\), got 4294967296"):
        philox((torch.arange(3), 0, 0, 0), (2**32, 0))
    with pytest.raises(HoldfastError, match="got -1"):
        philox((torch.arange(3), -1, 0, 0), (0, 0))


def test_batch_indices_known_answer():
    # seed, node, round and step 0 give the first known answer; count 2**30 keeps the top 30 bits of a word.
    indices = batch_indices(0, torch.tensor([0]), torch.tensor([2**30]), round=0, step=0, batch=4)
    assert indices.tolist() == [[word >> 2 for word in KNOWN[0][2]]]


def test_batch_indices_counter_order():
    words = torch.cat(
        [philox((torch.tensor(block), 3, 7, 9), (5, int(RandomStream.BATCH))) for block in (0, 1)]
    )
    indices = batch_indices(5, torch.tensor([9]), torch.tensor([1000]), round=7, step=3, batch=8)
    assert indices.tolist() == [[word * 1000 // 2**32 for word in words.tolist()]]


def test_a_node_draws_the_same_whoever_else_is_there():
    nodes, counts = torch.arange(10), torch.arange(10) * 7 + 1
    everyone = batch_indices(3, nodes, counts, round=2, step=5, batch=13)
    block = torch.tensor([8, 2, 5])
    assert torch.equal(batch_indices(3, block, counts[block], round=2, step=5, batch=13), everyone[block])


def test_a_smaller_batch_is_a_prefix():
    nodes, counts = torch.arange(4), torch.full((4,), 50)
    large = batch_indices(0, nodes, counts, round=1, step=1, batch=33)
    for batch in (1, 4, 30):
        assert torch.equal(batch_indices(0, nodes, counts, round=1, step=1, batch=batch), large[:, :batch])


def test_rounds_and_steps_as_tensors():
    nodes, counts = torch.arange(3), torch.tensor([5, 50, 500])
    each = torch.stack([batch_indices(1, nodes, counts, 4, step, 6) for step in range(8)])
    tensors = batch_indices(1, nodes, counts, torch.tensor(4), torch.tensor(2), 6)
    assert torch.equal(tensors, each[2])
    assert torch.equal(batch_indices(1, nodes, counts, 4, torch.arange(8)[:, None, None], 6), each)


def test_batch_indices_are_uniform_and_independent():
    nodes, counts = torch.arange(100), torch.full((100,), 7)
    draws = batch_indices(0, nodes, counts, round=0, step=0, batch=700)
    assert draws.min() == 0
    assert draws.max() == 6
    assert chi_square_p(draws.flatten().bincount(minlength=7)) > 1e-3
    # neighbours in each coordinate of the counter and the key: all 49 pairs of values equally often
    others = [
        draws.roll(1, dims=1),
        draws.roll(1, dims=0),
        batch_indices(0, nodes, counts, round=0, step=1, batch=700),
        batch_indices(0, nodes, counts, round=1, step=0, batch=700),
        batch_indices(1, nodes, counts, round=0, step=0, batch=700),
    ]
    for other in others:
        assert chi_square_p((7 * draws + other).flatten().bincount(minlength=49)) > 1e-3


def test_uniform_has_53_bits():
    high, low = KNOWN[0][2][:2]
    first = uniform(0, RandomStream.BATCH, round=0, step=0, index=torch.tensor(0))
    assert first.dtype == torch.float64
    assert first.item() == (high << 21 | low >> 11) / 2**53


def test_uniform_is_uniform_and_purposes_differ():
    index = torch.arange(64_000)
    draws = {stream: uniform(4, stream, round=1, step=2, index=index) for stream in RandomStream}
    for draw in draws.values():
        assert chi_square_p((draw * 64).long().bincount(minlength=64)) > 1e-3
    assert len({draw[0].item() for draw in draws.values()}) == len(RandomStream)


def test_uniform_takes_large_indices():
    # An index beyond 32 bits (a link of a very large network) must not alias a small one.
    near, far = uniform(0, RandomStream.LINK, 0, 0, torch.tensor([5, 5 + 2**32]))
    assert near != far


def test_coin():
    tosses = [coin(0, round, 0, 0.3) for round in range(1000)]
    assert abs(sum(tosses) - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5  # four standard deviations
    assert all(coin(0, round, 0, 1.0) for round in range(20))
    assert tosses != [coin(1, round, 0, 0.3) for round in range(1000)]
    with pytest.raises(HoldfastError, match=r"probability: should be greater than or equal to 0, got -0\.1"):
        coin(0, 0, 0, -0.1)


def test_cohort():
    subsets = Counter(tuple(cohort(0, round, nodes=4, size=2).tolist()) for round in range(600))
    assert sorted(subsets) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert chi_square_p(torch.tensor(list(subsets.values()))) > 1e-3
    assert cohort(0, 3, nodes=5, size=5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(HoldfastError, match="cohort of 6 nodes was asked for, but there are only 5"):
        cohort(0, 0, nodes=5, size=6)
    with pytest.raises(HoldfastError, match="size: should be greater than or equal to 1"):
        cohort(0, 0, nodes=5, size=0)


@on_gpu
def test_the_gpu_draws_the_same():
    nodes, counts = torch.arange(100), torch.arange(100) * 1000 + 1
    expected = batch_indices(7, nodes, counts, round=12, step=34, batch=130)
    round, step = torch.tensor(12, device="cuda"), torch.tensor(34, device="cuda")
    gpu_nodes, gpu_counts = nodes.cuda(), counts.cuda()
    torch.cuda.set_sync_debug_mode("error")  # raises if the host waits for the device
    try:
        drawn = batch_indices(7, gpu_nodes, gpu_counts, round, step, 130)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn.cpu(), expected)
    index = torch.arange(10_000) * 2**30
    gpu = uniform(7, RandomStream.COMPUTE, round, step, index.cuda())
    assert torch.equal(gpu.cpu(), uniform(7, RandomStream.COMPUTE, 12, 34, index))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_compiled_draws_are_the_same(batch) -> None:
    nodes, counts, now = torch.arange(3), torch.tensor([6, 9, 7]), torch.tensor(3)

    def draw(nodes: torch.Tensor, counts: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        return batch_indices(7, nodes, counts, now, now, batch)

    compiled = torch.compile(draw, dynamic=False)
    assert torch.equal(compiled(nodes, counts, now), draw(nodes, counts, now))
