"""CIFAR-10 python batches. They are pickles, and unpickling runs code: we only read their opcodes as data."""

from __future__ import annotations

import pickletools
from pathlib import Path

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.formats import Arrays, in_short

PIXELS = 3 * 32 * 32
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG1"}


def read_batches(first: Path) -> Arrays:
    """The five training batches and the test batch in the folder of ``first``, one of them."""
    train = [read_batch(first.parent / f"data_batch_{i}") for i in range(1, 6)]
    x_test, y_test = read_batch(first.parent / "test_batch")
    return Arrays(
        np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), x_test, y_test
    )


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] uint8 and labels [N] int64 of one file, a pickled dict of data and labels."""
    pixels, labels = b"", []
    in_labels = fortran = fortran_pixels = False
    try:
        for opcode, value, _ in pickletools.genops(path.read_bytes()):
            if opcode.name == "PROTO" and value not in range(5):
                raise ValueError(
                    "pickle protocol 5 stores arrays in another way; use 2, as the original does"
                )
            if opcode.name in ("NEWTRUE", "NEWFALSE"):
                fortran = opcode.name == "NEWTRUE"  # numpy's flag, just before the bytes of an array
            elif opcode.name in _INTEGERS and in_labels:
                labels.append(value)
            elif isinstance(value, (str, bytes)) and value != "latin1":  # Python 3 marks bytes with this
                in_labels = value in ("labels", b"labels")
                text = _latin1(value)
                if len(text) > len(pixels):
                    pixels, fortran_pixels = text, fortran
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    except ValueError as error:
        raise HoldfastError(f"{path}: corrupt or not a CIFAR-10 batch ({in_short(error)})") from None
    if not labels or len(pixels) != len(labels) * PIXELS or fortran_pixels:
        raise HoldfastError(
            f"{path}: not a CIFAR-10 batch: {len(labels)} labels, and {len(pixels)} bytes of pixels where "
            f"{PIXELS} per label were expected, row by row"
        )
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _latin1(value: str | bytes) -> bytes:
    """The bytes of a pickled string: Python 3 writes those of an array as Latin-1 text in older protocols."""
    if isinstance(value, bytes):
        return value
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return b""  # some other text, not bytes
