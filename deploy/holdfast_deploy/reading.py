"""How members read their tables: column j of the samples, and class c, must mean the same at all of them.

The shape of samples says nothing of that: a text column may have equally many, but other words at two sites.
So members tell one another digests of what their columns are called, of the words, and of the classes'
names, and whoever reads otherwise is refused. Names and words themselves stay at home.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.data.federated import TableForm

WHOLE, EACH = 32, 8  # hexadecimal digits: of the digest of a kind, and of those of single text columns
MOST_TEXTS = 1000  # columns with a digest of their own; more would not fit beside a question
KINDS = {
    "columns": "the names of the columns or their order",
    "words": "the words of their text columns",
    "classes": "the names of the classes",
}
DO = (
    "columns, words and classes must be the same in the same order everywhere: for example, turn text "
    "columns into columns of zeros and ones by one list of words, the same at every site"
)


@dataclass(frozen=True)
class Reading:
    """What a site knows about its samples: for each kind of ``KINDS`` that it knows, what others are told."""

    told: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[Any, ...] = ()  # the names of text columns

    @classmethod
    def of(cls, table: TableForm | None, class_names: Sequence[str] | None) -> Reading:
        """Of samples that came from ``table``, and whose classes have these names, if they are known."""
        told: dict[str, str] = {}
        texts: tuple[Any, ...] = ()
        if table is not None:
            texts = tuple(name for name in table.inputs if name in table.words)
            words = [list(map(str, table.words[name])) for name in texts]
            told["columns"] = _digest([*map(str, table.inputs), str(table.target)], WHOLE)
            each = [_digest(column, EACH) for column in words[:MOST_TEXTS]]
            told["words"] = ",".join([_digest(words, WHOLE), *each])
        if class_names is not None:
            told["classes"] = _digest(list(map(str, class_names)), WHOLE)
        return cls(told, texts)


class Readings:
    """What all members must share: the own reading, and of what is not known here, the first that is heard.

    A server has no table, nor has every node; yet what two of its peers have must be the same.
    """

    def __init__(self, name: str, own: Reading) -> None:
        self._own, self._told = own, dict(own.told)
        self._whose = dict.fromkeys(own.told, name)

    @property
    def told(self) -> str:
        """What stands beside every question of this member; "": it knows nothing."""
        return " ".join(f"{kind}={self._told[kind]}" for kind in KINDS if kind in self._told)

    def compare(self, who: str, theirs: str) -> None:
        """Complains if ``who``, who says ``theirs``, has read its table in another way."""
        for part in theirs.split():
            kind, _, said = part.partition("=")
            if kind not in KINDS:  # of a later version, perhaps
                continue
            if self._told.setdefault(kind, said) != said:
                raise HoldfastError(
                    f"another reading of the table: {who} and {self._whose[kind]} differ in "
                    f"{self._what_differs(kind, said)}; {DO}"
                )
            self._whose.setdefault(kind, who)

    def _what_differs(self, kind: str, said: str) -> str:
        """In people's words; the first text column, where this member knows what it is called."""
        if kind == "words":
            pairs = zip(self._own.texts, said.split(",")[1:], self._told[kind].split(",")[1:], strict=False)
            for name, theirs, ours in pairs:
                if theirs != ours:
                    return f"the words of column {str(name)!r}"
        return KINDS[kind]


def _digest(value: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:digits]
