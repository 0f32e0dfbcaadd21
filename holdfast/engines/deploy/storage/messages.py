"""Messages as files: a typed header, then raw numbers. Nothing is ever unpickled, and nothing held twice.

A file is the length of the header in four bytes, the header as JSON, and the tensors end to end. The header
holds a checksum over itself and the tensors. A model of several GB is written, sent, received, checked and
added up in pieces, never as a whole.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import named_leaves, tree_map
from holdfast.core.validation import LONGEST_REPR, explain, place

CHUNK = 1 << 20  # bytes of one piece on the wire
LONGEST_HEADER = 1 << 18

_LENGTH = struct.Struct("<I")

Number = Annotated[int, Field(ge=0, lt=2**31)]  # of a round or of an exchange
DType = Literal["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"]
Incarnations = dict[  # by member: what it drew when its folder was begun
    Annotated[str, Field(max_length=64)], Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
]

UNSEALED = "0" * 64  # in the place of a checksum


class DamagedError(HoldfastError):
    """A file is not as it was written."""


class TensorSpec(BaseModel):
    """Name, shape and number type of one tensor."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(max_length=100)
    shape: list[Annotated[int, Field(ge=0, lt=2**48)]] = Field(max_length=8)
    dtype: DType

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * numpy_type(self.dtype).itemsize


class Header(BaseModel):
    """What a message says about itself; all of it is checked before a number is looked at."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    federation: str = Field(max_length=64)
    sender: str = Field(max_length=64)
    round: Number  # counted from 1; 0 is before the first, the last round + 1 after the last
    exchange: Number  # the round's exchanges are numbered from 0
    tensors: list[TensorSpec] = Field(max_length=64)
    depends_on: Incarnations = {}  # the sender's, and those behind the messages that it had received
    notes: dict[str, Any] = Field(default={}, max_length=64)  # a node's own files only, never sent
    # SHA-256 of the header with ``UNSEALED`` here, then of the tensors; against malice there is TLS.
    checksum: str = Field(default=UNSEALED, pattern="^[0-9a-f]{64}$")

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def sealed(self, checksum: str = UNSEALED) -> Header:
        """The header with this checksum, or with none; as text it is as long as any other."""
        return self.model_copy(update={"checksum": checksum})

    def hash(self) -> Any:
        """SHA-256 that has seen the header, and is to be given the tensors' bytes."""
        return hashlib.sha256(self.sealed().model_dump_json().encode())

    def squeezed(self, piece: bytes) -> bytes:
        """A piece of the tensors, compressed."""
        return squeeze(piece, self.itemsize)

    @property
    def itemsize(self) -> int:
        """Bytes of every number; 1 where tensors are of several types."""
        sizes = {numpy_type(tensor.dtype).itemsize for tensor in self.tensors}
        return sizes.pop() if len(sizes) == 1 else 1


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """Little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def specs(tree: Any) -> list[TensorSpec]:
    """The tensors of ``tree``."""
    return [
        TensorSpec(name=name, shape=list(t.shape), dtype=_dtype_name(t)) for name, t in named_leaves(tree)
    ]


def _dtype_name(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")


def parse(model: type[Any], text: bytes) -> Any:
    """JSON ``text`` as ``model``; a ``HoldfastError`` if it is anything else."""
    what = f"not a valid {model.__name__.lower()}"
    if len(text) > LONGEST_HEADER:
        raise HoldfastError(f"{what}: {len(text)} bytes are too long")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        where = place(error.errors()[0]["loc"])[:LONGEST_REPR]
        raise HoldfastError(f"{what}: {where + ': ' if where else ''}{explain(error)}") from None


class MessageFile:
    """A message on disk, read in pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            length = _LENGTH.unpack(self._exactly(file, _LENGTH.size))[0]
            if length > LONGEST_HEADER:
                raise self._damaged()
            text = self._exactly(file, length)
        try:
            self.header: Header = parse(Header, text)
        except HoldfastError:
            raise self._damaged() from None
        if text != self.header.model_dump_json().encode():  # the checksum knows only this spelling
            raise self._damaged()
        self.start = _LENGTH.size + length
        if path.stat().st_size != self.start + self.header.size:
            raise self._damaged()

    def chunks(self, first: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The tensors' bytes from ``first`` on, in pieces."""
        left = self.header.size - first if size is None else size
        with self._open() as file:
            file.seek(self.start + first)
            while left:
                piece = self._exactly(file, min(CHUNK, left))
                left -= len(piece)
                yield piece

    def add_to(self, tree: Any, weight: float = 1.0) -> None:
        """Adds ``weight`` times this message to ``tree``, in place."""
        first = 0
        for spec, (_, total) in zip(self.header.tensors, named_leaves(tree), strict=True):
            flat, at = total.view(-1), 0
            for piece in self.chunks(first, spec.size):
                numbers = _numbers(piece, spec.dtype).to(flat)
                flat[at : at + len(numbers)].add_(numbers, alpha=weight)
                at += len(numbers)
            first += spec.size

    def read(self, like: Any, device: torch.device) -> Any:
        """A tree like ``like`` (its tensors may be on the device "meta") with this message's numbers."""
        specs_left, first = iter(self.header.tensors), 0

        def fill(template: Tensor) -> Tensor:
            nonlocal first
            spec = next(specs_left)
            target = torch.empty(spec.shape, dtype=template.dtype, device=device)
            flat, at = target.view(-1), 0
            for piece in self.chunks(first, spec.size):
                numbers = _numbers(piece, spec.dtype)
                flat[at : at + len(numbers)] = numbers.to(flat)
                at += len(numbers)
            first += spec.size
            return target

        return tree_map(fill, like)

    def verify(self) -> None:
        """Raises a ``DamagedError`` unless header and numbers are those that were written."""
        total = self.header.hash()
        for piece in self.chunks():
            total.update(piece)
        if total.hexdigest() != self.header.checksum:
            raise self._damaged()

    def check_numbers(self) -> None:
        """Whether all numbers are finite."""
        first = 0
        for spec in self.header.tensors:
            for piece in self.chunks(first, spec.size):
                require_finite(np.frombuffer(piece, numpy_type(spec.dtype)))
            first += spec.size

    def _open(self) -> BinaryIO:
        return self.path.open("rb", buffering=0)

    def _exactly(self, file: BinaryIO, size: int) -> bytes:
        content = file.read(size)
        while len(content) < size:
            more = file.read(size - len(content))
            if not more:
                raise self._damaged()
            content += more
        return content

    def _damaged(self) -> DamagedError:
        return DamagedError(f"{self.path} is damaged")


def checksum(header: Header, tree: Any) -> str:
    """Of ``header`` and of ``tree`` as it is sent; refuses numbers that a message must not hold."""
    total = header.hash()
    for piece in _content(header.tensors, tree):
        total.update(piece)
    return str(total.hexdigest())


def write_message(path: Path, header: Header, tree: Any) -> MessageFile:
    """Writes ``tree`` with ``header``, whose checksum is filled in; whole or not at all."""
    temporary = write_partial(path, header, tree)
    settle(temporary, path)
    return MessageFile(path)


def write_partial(path: Path, header: Header, tree: Any) -> Path:
    """Writes and syncs all that ``path`` is to hold; the file, still under another name."""
    temporary = path.with_name(f".{path.name}.partial")
    total = header.hash()
    try:
        with temporary.open("wb", buffering=0) as file:
            begin(file, header.sealed())
            for piece in _content(header.tensors, tree):
                total.update(piece)
                put(file, piece)
            file.seek(0)
            begin(file, header.sealed(total.hexdigest()))
            os.fsync(file.fileno())
    except HoldfastError:
        temporary.unlink()
        raise
    return temporary


def begin(file: BinaryIO, header: Header) -> None:
    """Writes the header."""
    text = header.model_dump_json().encode()
    put(file, _LENGTH.pack(len(text)) + text)


def put(file: BinaryIO, piece: bytes | memoryview) -> None:
    """Writes all of ``piece`` to an unbuffered file."""
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]


def settle(temporary: Path, path: Path) -> None:
    """Makes a synced temporary file the file ``path``, for good."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _content(tensors: list[TensorSpec], tree: Any) -> Iterator[memoryview]:
    for spec, (_, tensor) in zip(tensors, named_leaves(tree), strict=True):
        yield from _pieces(spec, tensor)


def _pieces(spec: TensorSpec, tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of ``tensor`` as ``spec`` wants them; refuses numbers that a message must not hold."""
    flat, target = tensor.detach().reshape(-1), numpy_type(spec.dtype)
    step = CHUNK // target.itemsize
    for at in range(0, len(flat), step):
        numbers = flat[at : at + step].cpu().numpy()
        piece = np.ascontiguousarray(numbers.astype(target, copy=False))
        if not is_finite(piece):
            raise HoldfastError("the training diverged: a number became infinite or NaN; try a smaller lr")
        yield piece.view(np.uint8).data


def is_finite(numbers: np.ndarray) -> bool:
    """Whether no number is NaN or infinite."""
    return bool(np.isfinite(numbers).all())


def require_finite(numbers: np.ndarray) -> None:
    """Refuses a message with other numbers."""
    if not is_finite(numbers):
        raise HoldfastError("a number is infinite or NaN")


def _numbers(piece: bytes, dtype: DType) -> Tensor:
    return torch.from_numpy(np.frombuffer(piece, numpy_type(dtype)).astype(np.dtype(dtype)))


# --- compression: of each piece on its own, so that nothing is held as a whole -----------------------------


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
