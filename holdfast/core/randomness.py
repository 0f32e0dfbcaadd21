"""Random numbers without a generator: every draw is a pure function of what it is for.

Philox turns a counter and a key into random words. The key is (seed, purpose) and the counter holds the node,
the round and the step, so a draw is the same on a CPU and on a GPU, whichever other nodes a process holds and
whatever was drawn before.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, check

Word = int | Tensor

_MASK = 0xFFFFFFFF


class RandomStream(IntEnum):
    """What a draw is for: the second word of the key, so that no two purposes share random numbers."""

    BATCH = 0
    COIN = 1
    COHORT = 2
    LINK = 3
    COMPUTE = 4
    CAPABILITY = 5
    CHANNEL = 6
    ORDER = 7
    TRANSFORM = 8
    PARTS = 9
    DROPOUT = 1 << 16  # the layers of a model count up from here
    AUGMENT = 1 << 24  # the draws of an augmentation count up from here
    NOISE = 1 << 25  # the noise of an access to private data, and what else that access releases
    DRAW = 1 << 31  # and here the calls of torch's dropout in a forward pass


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], rounds: int = 10) -> Tensor:
    """Philox4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    With 7 rounds it passes their tests already; 10 are their default, with a margin of safety.

    All six words lie in [0, 2**32): Python ints or int64 tensors that broadcast. Returns four random 32-bit
    words in int64, shape ``[..., 4]``.
    """
    for word in (*counter, *key):
        if isinstance(word, int) and not 0 <= word <= _MASK:
            raise HoldfastError(f"seed, node, round and step must lie in [0, 2**32), got {word}")
    gpu = [word.device for word in (*counter, *key) if isinstance(word, Tensor) and word.is_cuda]
    if not (gpu and isinstance(key[1], int) and _has_triton()):
        return _in_operations(counter, key, rounds)
    words = [
        word.to(gpu[0]) if isinstance(word, Tensor) else torch.full((), word, device=gpu[0])
        for word in (*counter, key[0])
    ]
    drawn: Tensor = _in_one(words, key[1], rounds)
    return drawn


def _in_operations(counter: Sequence[Word], key: Sequence[Word], rounds: int) -> Tensor:
    x0, x1, x2, x3 = counter
    x0, x2 = x0 & _MASK, x2 & _MASK  # torch.compile would fold the product with an arange into a 32-bit index
    k0, k1 = key
    for _ in range(rounds):
        # The products wrap into the sign bit of int64, but their bits are right; masks undo the signed shift.
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = (p1 >> 32 & _MASK) ^ x1 ^ k0, p1 & _MASK
        x2, x3 = (p0 >> 32 & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    words = [torch.as_tensor(x) for x in (x0, x1, x2, x3)]
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


@torch.library.custom_op("holdfast::philox", mutates_args=())
def _in_one(words: Sequence[Tensor], k1: int, rounds: int) -> Tensor:
    """Philox of counter and key, ``words`` and ``k1``, as one operation; on a GPU as one kernel.

    It comes down to 150 operations otherwise, and a compiler takes about 10 ms for each of them.
    """
    if not words[0].is_cuda:
        return _in_operations(words[:4], (words[4], k1), rounds)
    from holdfast.core.philox_kernel import philox_on_gpu  # only torch for a GPU comes with Triton

    return philox_on_gpu(words, k1, rounds)


@_in_one.register_fake
def _(words: Sequence[Tensor], k1: int, rounds: int) -> Tensor:
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    return words[0].new_empty(*shape, 4)


@_in_one.register_vmap
def _(info: Any, in_dims: Any, words: Sequence[Tensor], k1: int, rounds: int) -> tuple[Tensor, int]:
    """What is mapped becomes the first dimension, before those that broadcast."""
    pairs = zip(words, in_dims[0], strict=True)
    first = [word[None] if dim is None else word.movedim(dim, 0) for word, dim in pairs]
    longest = max(word.ndim for word in first)
    given = [word.view(len(word), *[1] * (longest - word.ndim), *word.shape[1:]) for word in first]
    drawn: Tensor = _in_one(given, k1, rounds)
    return drawn, 0


@cache
def _has_triton() -> bool:
    """Whether torch came with Triton, as it does for GPUs of NVIDIA and AMD."""
    return importlib.util.find_spec("triton") is not None


def batch_indices(seed: Word, nodes: Tensor, counts: Tensor, round: Word, step: Word, batch: int) -> Tensor:
    """Sample numbers of a minibatch, drawn with replacement: ``[m, batch]``, row i uniform in [0, counts[i]).

    ``nodes`` [m] are global node numbers and ``counts`` [m] their sample counts (below 2**31). ``round`` and
    ``step`` may be tensors on the device; a ``step`` of shape ``[K, 1, 1]`` gives ``[K, m, batch]``.
    A smaller batch is a prefix of a larger one.
    """
    words = philox((_blocks(batch, nodes), step, round, nodes[:, None]), (seed, int(RandomStream.BATCH)))
    return words.flatten(-2)[..., :batch] * counts[:, None] >> 32


def shuffled(
    seed: Word, nodes: Tensor, counts: Tensor, longest: int, round: Word, draw: Word
) -> tuple[Tensor, Tensor]:
    """The samples of each of ``nodes`` [m] in a random order: random words, ascending, and sample numbers.

    Both are [m, longest]. Behind the ``counts`` [m] samples of a node follow words of 2**32 with numbers that
    it does not have. ``draw``, an int or [m, 1], tells orders of one round apart.
    """
    counter = (_blocks(longest, nodes), draw, round, nodes[:, None])
    words = philox(counter, (seed, int(RandomStream.ORDER))).flatten(-2)[:, :longest]
    return in_order(words, counts)


def in_order(words: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Random 32-bit ``words`` [m, longest] in the form of ``shuffled``; nodes have ``counts`` [m] samples."""
    beyond = torch.arange(words.shape[1], device=words.device) >= counts[:, None]
    # A stable sort, so that equal words fall into the same order on every device.
    ordered, places = torch.where(beyond, _MASK + 1, words).sort(dim=-1, stable=True)
    return ordered, places


def random_uniform(key: Tensor, shape: Sequence[int], draw: int = 0) -> Tensor:
    """Numbers of ``shape`` in [0, 1), float32, for an augmentation: a pure function of ``key`` and ``draw``.

    ``key`` [4] is what ``augment(batch, key)`` is given. Give each call in it a ``draw`` of its own, 0, 1,
    ..., or they draw the same numbers.
    """
    return (_words(key, math.prod(shape), draw) >> 8).to(torch.float32).mul(2.0**-24).view(*shape)


def random_normal(key: Tensor, shape: Sequence[int], draw: int = 0) -> Tensor:
    """The same for a normal distribution with mean 0 and variance 1 (Box and Muller)."""
    size = math.prod(shape)
    first, second = ((_words(key, 2 * size, draw) >> 8).to(torch.float32) * 2.0**-24).view(2, size).unbind()
    return ((-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)).view(*shape)


def _words(key: Tensor, size: int, draw: int) -> Tensor:
    seed, node, round, step = key.unbind()
    return philox((_blocks(size, key), step, round, node), (seed, RandomStream.AUGMENT + draw)).flatten()[
        :size
    ]


def _blocks(size: int, like: Tensor) -> Tensor:
    """The numbers of as many blocks of four words as give ``size`` words, on the device of ``like``.

    They are two at least: with a single one, what torch.compile makes for a CPU computes other words.
    """
    return torch.arange(max(2, -(-size // 4)), device=like.device)


def uniform(seed: int, stream: RandomStream, round: Word, step: Word, index: Tensor) -> Tensor:
    """One float64 in [0, 1) for each non-negative entry of ``index`` (a node, a link ...), same shape."""
    words = philox((index & _MASK, step, round, index >> 32), (seed, int(stream)))
    return (words[..., 0] << 21 | words[..., 1] >> 11).double() * 2.0**-53


def coin(seed: int, round: int, draw: int, probability: float) -> bool:
    """The round's ``draw``-th coin that all nodes share: true with ``probability``."""
    check("probability", Annotated[float, Field(ge=0, le=1)], probability)
    return bool(uniform(seed, RandomStream.COIN, round, draw, torch.tensor(0)) < probability)


def poisson_cohort(seed: int, round: int, nodes: int, size: int) -> Tensor:
    """Of ``nodes``, each with probability ``size`` / ``nodes`` by itself: sorted numbers, perhaps none."""
    draws = uniform(seed, RandomStream.COHORT, round, 1, torch.arange(nodes))
    return torch.nonzero(draws < size / nodes).squeeze(-1)


def cohort(seed: int, round: int, nodes: int, size: int) -> Tensor:
    """``size`` distinct nodes out of ``nodes``, all subsets equally likely: sorted numbers ``[size]``."""
    check("size", Count, size)
    if size > nodes:
        raise HoldfastError(f"a cohort of {size} nodes was asked for, but there are only {nodes} nodes")
    draws = uniform(seed, RandomStream.COHORT, round, 0, torch.arange(size)).tolist()
    chosen: set[int] = set()
    for draw, last in zip(draws, range(nodes - size, nodes), strict=True):  # Floyd's method: O(size)
        pick = int(draw * (last + 1))
        chosen.add(last if pick in chosen else pick)
    return torch.tensor(sorted(chosen))
