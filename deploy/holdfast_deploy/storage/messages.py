"""Messages as files: a typed header, then raw numbers. Nothing is ever unpickled, and nothing held twice.

A file is the length of the header in four bytes, the header as JSON, and the tensors end to end. The header
holds a digest of the tensors and a checksum over itself. A model of several GB is written, sent, received,
checked and added up in pieces, never as a whole.
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

from holdfast.core.errors import DAMAGED, HoldfastError
from holdfast.core.files import replace_durably
from holdfast.core.tree import leaves, named_leaves, tree_map
from holdfast.core.validation import LONGEST_REPR, explain, place

CHUNK = 1 << 20  # bytes of one piece on the wire
LONGEST_HEADER = 1 << 18

LENGTH = struct.Struct("<I")  # of a header, or of a compressed piece, before it

Number = Annotated[int, Field(ge=0, lt=2**31)]  # of a round or of an exchange
HANDED_OVER = 2**30  # the number of the exchange in which a member that joins receives a model
DType = Literal["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"]
ExchangeKey = tuple[int, int]  # of a message: its message round, and which exchange of the round
Incarnations = dict[  # by member: what it drew when its folder was begun
    Annotated[str, Field(max_length=64)], Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
]

UNSEALED = "0" * 64  # in the place of a digest
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # SHA-256


class DamagedError(HoldfastError):
    """A file is not as it was written."""

    exit_code = DAMAGED


class BeyondRepairError(HoldfastError):
    """A member's files are damaged, and it cannot mend them by itself."""

    exit_code = DAMAGED


class DivergedError(HoldfastError):
    """What is to be written holds a number that is infinite or NaN."""


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
    content: Digest = UNSEALED  # of the tensors' bytes; the same whenever the message is computed again
    checksum: Digest = UNSEALED  # of the header with ``UNSEALED`` here; against malice there is TLS

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def sealed(self, content: str) -> Header:
        """The header for tensors with the digest ``content``; as text it is as long as before."""
        open = self.model_copy(update={"content": content, "checksum": UNSEALED})
        checksum = hashlib.sha256(open.model_dump_json().encode()).hexdigest()
        return open.model_copy(update={"checksum": checksum})

    def seals(self, content: str) -> bool:
        """Whether this is the header, as it was written, of tensors with the digest ``content``."""
        return self == self.sealed(content)

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
    named = [(name, t.shape, str(t.dtype).removeprefix("torch.")) for name, t in named_leaves(tree)]
    return [TensorSpec.model_validate({"name": n, "shape": list(s), "dtype": d}) for n, s, d in named]


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

    def __init__(self, path: Path, norm: float = 0.0) -> None:
        self.path, self.norm = path, norm  # of all numbers; 0 where nobody has looked at them
        with self._open() as file:
            length = LENGTH.unpack(self._exactly(file, LENGTH.size))[0]
            if length > LONGEST_HEADER:
                raise self._damaged()
            text = self._exactly(file, length)
        try:
            self.header: Header = parse(Header, text)
        except HoldfastError:
            raise self._damaged() from None
        if text != self.header.model_dump_json().encode():  # the checksum knows only this spelling
            raise self._damaged()
        self.start = LENGTH.size + length
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

    def frames(self, lossless: bool, first: int = 0) -> Iterator[bytes]:
        """The pieces from byte ``first`` on, as they are sent: if ``lossless``, compressed, each after its
        length."""
        for piece in self.chunks(first):
            if lossless:
                piece = squeeze(piece, self.header.itemsize)
                yield LENGTH.pack(len(piece))
            yield piece

    def numbers(self) -> Iterator[tuple[int, slice, np.ndarray]]:
        """All numbers, in pieces: the tensor that they are of, and which of its numbers."""
        first = 0
        for i, spec in enumerate(self.header.tensors):
            dtype, at = numpy_type(spec.dtype), 0
            for piece in self.chunks(first, spec.size):
                numbers = np.frombuffer(piece, dtype)
                yield i, slice(at, at + len(numbers)), numbers
                at += len(numbers)
            first += spec.size

    def add_to(self, tree: Any, weight: float = 1.0) -> None:
        """Adds ``weight`` times this message to ``tree``, in place."""
        totals = [total.view(-1) for total in leaves(tree)]
        for i, where, numbers in self.numbers():
            totals[i][where].add_(_tensor(numbers).to(totals[i]), alpha=weight)

    def read(self, like: Any, device: torch.device) -> Any:
        """A tree like ``like`` (its tensors may be on the device "meta") with this message's numbers."""
        pairs = zip(self.header.tensors, leaves(like), strict=True)
        tensors = [torch.empty(spec.shape, dtype=t.dtype, device=device) for spec, t in pairs]
        for i, where, numbers in self.numbers():
            tensors[i].view(-1)[where] = _tensor(numbers).to(tensors[i])
        left = iter(tensors)
        return tree_map(lambda _: next(left), like)

    def verify(self) -> None:
        """Raises a ``DamagedError`` unless header and numbers are those that were written."""
        total = hashlib.sha256()
        for piece in self.chunks():
            total.update(piece)
        if not self.header.seals(total.hexdigest()):
            raise self._damaged()

    def squares(self) -> float:
        """The sum of the squares of all numbers, which have to be finite."""
        return sum(require_finite(numbers) for _, _, numbers in self.numbers())

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


def digest(tree: Any) -> str:
    """Of ``tree`` as it is sent; refuses numbers that a message must not hold."""
    total = hashlib.sha256()
    for piece, _ in _content(specs(tree), tree):
        total.update(piece)
    return total.hexdigest()


def write_message(path: Path, header: Header, tree: Any) -> MessageFile:
    """Writes ``tree`` with ``header``, whose digests are filled in; whole or not at all."""
    temporary, norm = write_partial(path, header, tree)
    replace_durably(temporary, path)
    return MessageFile(path, norm)


def write_partial(path: Path, header: Header, tree: Any) -> tuple[Path, float]:
    """Writes and syncs all that ``path`` is to hold; the file, still under another name, and its norm."""
    temporary = path.with_name(f".{path.name}.partial")
    total, norm = hashlib.sha256(), 0.0
    try:
        with temporary.open("wb", buffering=0) as file:
            begin(file, header.sealed(UNSEALED))
            for piece, squares in _content(header.tensors, tree):
                total.update(piece)
                norm += squares
                put(file, piece)
            file.seek(0)
            begin(file, header.sealed(total.hexdigest()))
            os.fsync(file.fileno())
    except HoldfastError:
        temporary.unlink()
        raise
    return temporary, math.sqrt(norm)


def begin(file: BinaryIO, header: Header) -> None:
    """Writes the header."""
    text = header.model_dump_json().encode()
    put(file, LENGTH.pack(len(text)) + text)


def put(file: BinaryIO, piece: bytes | memoryview) -> None:
    """Writes all of ``piece`` to an unbuffered file."""
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]


def _content(tensors: list[TensorSpec], tree: Any) -> Iterator[tuple[memoryview, float]]:
    """The bytes of ``tree`` as ``tensors`` say, in pieces, with sums of squares; all must be finite."""
    for spec, tensor in zip(tensors, leaves(tree), strict=True):
        flat, target = tensor.detach().reshape(-1), numpy_type(spec.dtype)
        for part in torch.split(flat, CHUNK // target.itemsize):
            piece = np.ascontiguousarray(part.cpu().numpy().astype(target, copy=False))
            try:
                squares = require_finite(piece)
            except HoldfastError:
                raise DivergedError("the training diverged: a number became infinite or NaN") from None
            yield piece.view(np.uint8).data, squares


def require_finite(numbers: np.ndarray) -> float:
    """The sum of the squares; refuses NaN and infinity. Integers count nothing: they are codes."""
    if numbers.dtype.kind != "f":
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(numbers, numbers)) if numbers.dtype.itemsize >= 4 else math.nan
    if not math.isfinite(total):  # perhaps the sum alone is out of range
        if not np.isfinite(numbers).all():
            raise HoldfastError("a number is infinite or NaN")
        wide = numbers.astype(np.float64)
        total = float(np.dot(wide, wide))
    return total


def _tensor(numbers: np.ndarray) -> Tensor:
    """A copy, in this machine's byte order."""
    return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("=")))


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
