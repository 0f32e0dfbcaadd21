"""Lossless compression: of each piece of a message on its own, so that nothing is held as a whole."""

from __future__ import annotations

import zlib

import numpy as np

from holdfast.core.errors import HoldfastError


def squeeze(piece: bytes, itemsize: int) -> bytes:
    """``piece`` without loss in fewer bytes: like bytes of all numbers side by side, then deflated."""
    planes = np.frombuffer(piece, np.uint8).reshape(-1, itemsize).T
    return zlib.compress(np.ascontiguousarray(planes).tobytes(), 1)


def expand(squeezed: bytes, size: int, itemsize: int) -> bytes:
    """What ``squeeze`` was given, if it had ``size`` bytes; never more memory than that."""
    inflate = zlib.decompressobj()
    try:
        planes = inflate.decompress(squeezed, size)
    except zlib.error:
        raise HoldfastError("a compressed piece is damaged") from None
    if len(planes) != size or not (inflate.eof or inflate.decompress(inflate.unconsumed_tail, 1) == b""):
        raise HoldfastError(f"a compressed piece should hold {size} bytes")
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T).tobytes()
