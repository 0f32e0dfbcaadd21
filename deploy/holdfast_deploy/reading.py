"""How members read their tables: column j of the samples, and class c, must mean the same at all of them.

The shape of samples does not show that: a text column may have equally many, but different words at two
sites. So members send each other digests of the names of their columns, of the words, and of the names of the
classes. A member whose digests differ is refused. The names and words themselves are not sent.
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
    """What a site knows about its samples: digests, for each kind of ``KINDS`` that it knows."""

    digests: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[Any, ...] = ()  # the names of text columns

    @classmethod
    def of(cls, table: TableForm | None, class_names: Sequence[str] | None) -> Reading:
        """Of samples that came from ``table``, and whose classes have these names, if they are known."""
        digests: dict[str, str] = {}
        texts: tuple[Any, ...] = ()
        if table is not None:
            texts = tuple(name for name in table.inputs if name in table.words)
            words = [list(map(str, table.words[name])) for name in texts]
            digests["columns"] = _digest([*map(str, table.inputs), str(table.target)], WHOLE)
            each = [_digest(column, EACH) for column in words[:MOST_TEXTS]]
            digests["words"] = ",".join([_digest(words, WHOLE), *each])
        if class_names is not None:
            digests["classes"] = _digest(list(map(str, class_names)), WHOLE)
        return cls(digests, texts)


class Readings:
    """What all members must share: the own reading, and of what is not known here, the first that arrives.

    A server has no table, nor has every node, but those of its peers must agree.
    """

    def __init__(self, name: str, own: Reading) -> None:
        self._own, self._digests = own, dict(own.digests)
        self._whose = dict.fromkeys(own.digests, name)

    @property
    def header(self) -> str:
        """What is sent beside every question of this member; "": it knows nothing."""
        return " ".join(f"{kind}={self._digests[kind]}" for kind in KINDS if kind in self._digests)

    def compare(self, who: str, theirs: str) -> None:
        """Raises an error if the member ``who``, with the header ``theirs``, reads its table differently."""
        for part in theirs.split():
            kind, _, said = part.partition("=")
            if kind not in KINDS:  # of a later version, perhaps
                continue
            if self._digests.setdefault(kind, said) != said:
                raise HoldfastError(
                    f"another reading of the table: {who} and {self._whose[kind]} differ in "
                    f"{self._what_differs(kind, said)}; {DO}"
                )
            self._whose.setdefault(kind, who)

    def _what_differs(self, kind: str, said: str) -> str:
        """In words; the first text column that differs, where this member knows its name."""
        if kind == "words":
            own = self._digests[kind].split(",")[1:]
            pairs = zip(self._own.texts, said.split(",")[1:], own, strict=False)
            for name, theirs, ours in pairs:
                if theirs != ours:
                    return f"the words of column {str(name)!r}"
        return KINDS[kind]


def _digest(value: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:digits]
