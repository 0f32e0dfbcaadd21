"""Messages that went wrong, in every way that a seeded generator comes up with."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from typing import Any, ClassVar

import numpy as np

from holdfast_deploy.storage.messages import Header

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 2**31, 2**63, 10**40, math.nan, math.inf, "", "x", "\u0000", "é" * 70, "a" * 5000,
    [], [[]], [None] * 100, {}, {"a": {"b": [1]}}, "1", "__class__",
]  # fmt: skip
BAD_NUMBERS = [math.nan, math.inf, -math.inf]


class Mangler:
    """Turns good messages (a JSON header and frames of float32 numbers) into bad ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mangle(self, head: dict[str, Any], frames: list[bytes]) -> tuple[str, list[bytes]]:
        """(kind of mistake, all frames with the header first); ``head`` is left alone."""
        kind = self.random.choice([*self.HEADERS, *(self.PAYLOADS if frames else ())])
        if kind in self.HEADERS:
            return kind, [self.HEADERS[kind](self, head), *frames]
        copy = json.loads(json.dumps(head))
        spoiled = self.PAYLOADS[kind](self, copy, list(frames))
        return kind, [json.dumps(copy).encode(), *spoiled]

    # --- headers -------------------------------------------------------------------------------------------

    def garbage(self, head: dict[str, Any]) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 5, 100, 1000]))

    def truncated_header(self, head: dict[str, Any]) -> bytes:
        text = json.dumps(head).encode()
        return text[: self.random.randrange(len(text))]

    def flipped_bits(self, head: dict[str, Any]) -> bytes:
        text = bytearray(json.dumps(head).encode())
        for _ in range(self.random.randint(1, 4)):
            text[self.random.randrange(len(text))] ^= 1 << self.random.randrange(8)
        return bytes(text)

    def odd_value(self, head: dict[str, Any]) -> bytes:
        copy = json.loads(json.dumps(head))
        table = self._tables(copy)
        table[self.random.choice(list(table))] = self.random.choice(ODD_VALUES)
        return json.dumps(copy).encode()

    def missing_key(self, head: dict[str, Any]) -> bytes:
        copy = json.loads(json.dumps(head))
        table = self._tables(copy)
        del table[self.random.choice(list(table))]
        return json.dumps(copy).encode()

    def unknown_key(self, head: dict[str, Any]) -> bytes:
        name = "".join(self.random.choices("abcdefgh", k=self.random.choice([3, 30, 3000])))
        return json.dumps(head | {name: 1}).encode()

    def wrong_number(self, head: dict[str, Any]) -> bytes:
        """Wrong round or exchange."""
        copy = json.loads(json.dumps(head))
        table = self._tables(copy)
        numbers = [key for key, value in table.items() if type(value) is int] or ["round"]
        table[self.random.choice(numbers)] = self.random.choice([0, 7, 99, 2**40]) + self.random.randrange(9)
        return json.dumps(copy).encode()

    def nested(self, head: dict[str, Any]) -> bytes:
        depth = self.random.choice([10, 1000, 20_000])
        return b"[" * depth + b"]" * depth

    def _tables(self, head: dict[str, Any]) -> dict[str, Any]:
        """One of the tables in the header, of whatever depth."""
        tables, found = [head], []
        while tables:
            table = tables.pop()
            if table:
                found.append(table)
            for value in table.values():
                tables += [
                    part for part in (value if isinstance(value, list) else [value]) if type(part) is dict
                ]
        return self.random.choice(found)

    # --- what follows the header ---------------------------------------------------------------------------

    def truncated(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        cut = self.random.choice([0, 1, len(frames[-1]) // 2, len(frames[-1]) - 1])
        return frames[:-1] + ([frames[-1][:cut]] if cut else [])

    def oversized(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        more = self.random.randbytes(self.random.choice([1, 4, 70_000]))
        return [*frames, more] if self.random.random() < 0.5 else [*frames[:-1], frames[-1] + more]

    def wrong_shape(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        tensor = self._header(head)["tensors"][0]
        tensor["shape"] = self.random.choice(
            [[], [1], [2, 21], [21, 1], [1, 22], [1] * 8, [2**40, 2**40], [0]]
        )
        return frames

    def wrong_type(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        self._header(head)["tensors"][0]["dtype"] = self.random.choice(
            ["float16", "float64", "int64", "object"]
        )
        return frames

    def not_finite(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        """NaN or infinity, and a checksum that is right."""
        frame = bytearray(frames[0])
        at = 4 * self.random.randrange(len(frame) // 4)
        frame[at : at + 4] = struct.pack("<f", self.random.choice(BAD_NUMBERS))
        spoiled, inner = [bytes(frame), *frames[1:]], self._header(head)
        sealed = Header.model_validate(inner).sealed(hashlib.sha256(b"".join(spoiled)).hexdigest())
        inner |= {"content": sealed.content, "checksum": sealed.checksum}
        return spoiled

    def wrong_numbers(self, head: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        """The right size, and a checksum that is wrong."""
        numbers = np.frombuffer(self.random.randbytes(len(frames[0])), np.uint8) & 0x3F  # all finite
        return [numbers.tobytes(), *frames[1:]]

    @staticmethod
    def _header(head: dict[str, Any]) -> dict[str, Any]:
        inner: dict[str, Any] = head.get("header", head)
        return inner

    HEADERS: ClassVar = {
        f.__name__: f
        for f in (
            garbage, truncated_header, flipped_bits, odd_value, missing_key, unknown_key, wrong_number, nested
        )
    }  # fmt: skip
    PAYLOADS: ClassVar = {
        f.__name__: f for f in (truncated, oversized, wrong_shape, wrong_type, not_finite, wrong_numbers)
    }
