"""The global generators of Python, numpy and torch, which transforms of data sets draw from."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

_one_at_a_time = threading.RLock()  # several nodes may read in threads of one process


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the global generators (torch's on the CPU) continue as if nothing had been drawn."""
    with _one_at_a_time:
        python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(of_torch)


def seed_generators(words: Sequence[int]) -> None:
    """Seeds all of them with four words of 32 bits."""
    random.seed(words[0])
    np.random.seed(words[1])
    torch.default_generator.manual_seed(words[2] << 32 | words[3])


class DrawsWatched:
    """Whether anything has been drawn from the global generators since this was made."""

    def __init__(self) -> None:
        self._before = self._states()

    @property
    def drawn(self) -> bool:
        return self._before != self._states()

    @staticmethod
    def _states() -> tuple[object, ...]:
        _, keys, *rest = np.random.get_state(legacy=True)
        of_numpy = (np.asarray(keys).tobytes(), *rest)
        return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()
