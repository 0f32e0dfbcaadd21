"""Random numbers that nobody else can draw: what a member adds to what it releases, and what it samples.

They come from a key that the member draws once from the operating system and never shows. A round that is
computed again after a crash draws the same numbers, so that the very same message goes out, and nothing new
is released about the same data.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.files import replace_durably
from holdfast.core.randomness import Word, in_order
from holdfast.problem.private import OwnRandomness

KEY_BYTES = 32
GRID = 2.0**-30  # of the noise's standard deviation: sums and noise are rounded to multiples of it
COARSEST = 100.0  # steps of a grid in a standard deviation, at least: sums of rounded noise are then normal


def read_key(path: Path) -> bytes:
    """The member's key in ``path``; drawn and written down for its owner alone, if there is none."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        replace_durably(partial, path)
    if path.stat().st_mode & 0o077:
        raise HoldfastError(f"{path}: others may read the key; chmod 600 {path}")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise HoldfastError(f"{path} is damaged: a key has {KEY_BYTES} bytes, it has {len(key)}; put it back")
    return key


class OwnNoise(OwnRandomness):
    """Random numbers of one member in one run: functions of its ``key``, the ``run``, the round and the step.

    ``run`` names the federation, the folder's incarnation and the data, so that no two runs share numbers.
    ``noted`` receives a digest of each release. Releases are multiples of ``grid``; None: of a power of two
    that is far smaller than the noise. ``rounded``: by how much each number of one message may have been
    rounded before it was added to the sums.
    """

    def __init__(
        self,
        key: bytes,
        run: str,
        noted: Callable[[bytes], None],
        grid: float | None = None,
        rounded: float = 0.0,
    ) -> None:
        self._key, self._noted = hashlib.blake2b(run.encode(), key=key, digest_size=32).digest(), noted
        self._grid, self._rounded = grid, rounded

    def shuffle(
        self, nodes: Tensor, counts: Tensor, longest: int, round: Word, draw: Word
    ) -> tuple[Tensor, Tensor]:
        words = np.frombuffer(self._stream(b"sample", round, draw, 0, 4 * longest), "<u4").astype(np.int64)
        return in_order(torch.from_numpy(words).to(counts.device).unsqueeze(0), counts)

    def chosen(self, count: int, probability: float, round: int) -> list[int]:
        """Of the numbers below ``count``, each with ``probability`` by itself, ascending."""
        words = np.frombuffer(self._stream(b"cohort", round, 0, 0, 8 * count), "<u8").tolist()
        return [number for number, word in enumerate(words) if word < int(probability * 2.0**64)]

    def noised(
        self, sums: Tensor, sensitivity: Tensor, multiplier: float, round: Word, step: Word, draw: int
    ) -> Tensor:
        exact = sums.detach().double().cpu().numpy()
        # Different sums in the same draw, as after another member's message has changed, get different noise.
        digest = hashlib.blake2b(exact.tobytes(), key=self._key, digest_size=32).digest()
        self._noted(digest + struct.pack("<III", int(round), int(step), draw))
        normal = normals(self._stream(digest, round, step, draw, 16 * -(-exact.size // 2)))[: exact.size]
        one = float(sensitivity)
        grid = self._grid or 2.0 ** math.floor(math.log2(GRID * multiplier * one))
        # Rounding may move two neighbouring sums apart by a step of the grid in each of d numbers.
        deviation = multiplier * (one + (grid + self._rounded) * math.sqrt(exact.size))
        if deviation < COARSEST * grid:
            raise HoldfastError(
                f"private: noise of {deviation:.3g} is too small to be rounded to multiples of {grid:.3g}; "
                "take a larger clip, or more noise"
            )
        units = np.rint(exact / grid) + np.rint(deviation / grid * normal)
        return torch.from_numpy(units * grid).to(sums)

    def _stream(self, purpose: bytes, round: Word, step: Word, draw: int, size: int) -> bytes:
        """``size`` bytes of the keystream for one draw of a purpose."""
        key = hashlib.blake2b(purpose, key=self._key, digest_size=32, person=b"stream").digest()
        nonce = struct.pack("<IIII", 0, int(round), int(step), draw)  # the first four bytes count blocks
        return Cipher(ChaCha20(key, nonce), mode=None).encryptor().update(bytes(size))


def normals(stream: bytes) -> np.ndarray:
    """Standard normal numbers in float64, one for 8 bytes, by Box and Muller from 64-bit uniform numbers."""
    words = np.frombuffer(stream, "<u8").reshape(-1, 2).T
    # A small word keeps all its bits, so that tails reach to 9.4 deviations.
    first, second = (words.astype(np.float64) + 0.5) * 2.0**-64
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
