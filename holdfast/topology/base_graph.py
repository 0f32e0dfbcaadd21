"""Base-(k+1) graphs: at most k links at a node in a round, and exact averages after finitely many rounds.

Takezawa, Sato, Bao, Niwa and Yamada 2023, arXiv 2305.11420. A round is a list of links (i, j, W_ij).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, combinations, zip_longest

import numpy as np
from scipy.sparse import csr_array

from holdfast.core.validation import Count
from holdfast.topology.graphs import TOPOLOGIES, TwoOrMore
from holdfast.topology.network import Network

Round = list[tuple[int, int, float]]


@TOPOLOGIES.register_checked("base-graph", weights="own")
def base_graph(nodes: TwoOrMore, degree: Count = 1) -> Network:
    """Links that change in every round, at most `degree` at a node: exact averages over each period."""
    return Network.varying(base_weights(nodes, degree))


def base_weights(nodes: int, degree: int) -> list[csr_array]:
    """The weights [n, n] of each round of one period."""
    return [weights_of(links, nodes) for links in _shortest(list(range(nodes)), degree)]


def weights_of(links: Round, nodes: int) -> csr_array:
    """The symmetric, doubly stochastic matrix [n, n] with these weights on links; the rest stays at home."""
    own, other, weight = (np.array(column) for column in zip(*links, strict=True))
    diagonal = np.arange(nodes)
    home = 1 - np.bincount(own, weight, nodes) - np.bincount(other, weight, nodes)
    rows, columns = np.concatenate([own, other, diagonal]), np.concatenate([other, own, diagonal])
    return csr_array((np.concatenate([weight, weight, home]), (rows, columns)), shape=(nodes, nodes))


def _shortest(nodes: list[int], degree: int) -> list[Round]:
    """The paper's Algorithm 3: the simple graph, or simple graphs on groups and averages across them."""
    size, groups = len(nodes), _smooth_part(len(nodes), degree + 1)
    simple = _simple(nodes, degree)
    if groups in (1, size):
        return simple
    split = [nodes[start::groups] for start in range(groups)]
    within = _at_once([_simple(group, degree) for group in split])
    across = _at_once([_smooth(list(column), degree) for column in zip(*split, strict=True)])
    return min(simple, within + across, key=len)


def _simple(nodes: list[int], degree: int) -> list[Round]:
    """The paper's Algorithm 2, for any number of nodes.

    By the digits of n in base k + 1, nodes form parts of a (k+1)^p, where a is the digit. Each part averages
    within itself. Then, part after part, every node of the smaller parts is linked with one node of each of
    the part's a blocks of (k+1)^p. With these weights the mean of each block, and that of the smaller parts,
    becomes the mean of all. A block then averages within itself while the smaller parts continue.
    """
    parts = _parts(nodes, degree + 1)
    first = _at_once([_smooth(list(chain(*blocks)), degree) for blocks in parts])
    later: list[list[Round]] = []
    for number, blocks in enumerate(parts[:-1]):
        rest = list(chain(*chain(*parts[number + 1 :])))
        weight = len(blocks[0]) / (len(rest) + len(blocks) * len(blocks[0]))
        giving = [(node, block[k], weight) for block in blocks for k, node in enumerate(rest)]
        waiting: list[Round] = [[]] * number
        later.append([*waiting, giving, *_at_once([_smooth(block, degree) for block in blocks])])
    return first + _at_once(later)


def _smooth(nodes: list[int], degree: int) -> list[Round]:
    """The paper's Algorithm 1, the hyper-hypercube: n is a product of factors up to k + 1, a round for each.

    In a round nodes that differ in one digit of their number average among themselves.
    """
    rounds: list[Round] = []
    stride = 1
    factors = _factors(len(nodes), degree + 1)
    assert factors is not None, "parts and groups are chosen to be smooth"
    for factor in factors:
        starts = [k for k in range(len(nodes)) if k // stride % factor == 0]
        groups = [[nodes[k + digit * stride] for digit in range(factor)] for k in starts]
        rounds.append([(i, j, 1 / factor) for group in groups for i, j in combinations(group, 2)])
        stride *= factor
    return rounds


def _parts(nodes: list[int], base: int) -> list[list[list[int]]]:
    """The nodes as parts by the digits of n in this base, largest first; a part is a list of equal blocks."""
    power = 1
    while power * base <= len(nodes):
        power *= base
    parts, left = [], nodes
    while left:
        if digit := len(left) // power:
            parts.append([left[k * power : (k + 1) * power] for k in range(digit)])
            left = left[digit * power :]
        power //= base
    return parts


def _at_once(schedules: list[list[Round]]) -> list[Round]:
    """Schedules of disjoint nodes side by side; those that are done early wait."""
    return [list(chain(*(links or () for links in now))) for now in zip_longest(*schedules)]


@lru_cache(maxsize=256)
def _factors(size: int, most: int) -> tuple[int, ...] | None:
    """The fewest factors of at most ``most`` whose product is ``size``; None if there are none."""
    if size == 1:
        return ()
    found = []
    for factor in range(min(most, size), 1, -1):
        if size % factor == 0 and (others := _factors(size // factor, most)) is not None:
            found.append((factor, *others))
    return min(found, key=len, default=None)


def _smooth_part(size: int, most: int) -> int:
    """The largest divisor of ``size`` whose prime factors are all at most ``most``."""
    part = 1
    for factor in range(2, most + 1):
        while size % (part * factor) == 0:
            part *= factor
    return part
