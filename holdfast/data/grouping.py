"""Groups named by numbers or words, such as the hospital that a sample comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.arrays import as_owners


class Grouping(NamedTuple):
    """Which group each sample belongs to."""

    of_row: np.ndarray  # [N] int64: positions in ``names``
    names: tuple[str, ...]  # ascending, as numbers or as words

    @classmethod
    def of(cls, where: str, values: Any) -> Grouping:
        """``values`` [N] are whole numbers or words."""
        array = np.asarray(values) if not hasattr(values, "cpu") else values.cpu().numpy()
        if array.dtype.kind in "OUS" and array.ndim == 1:
            if wrong := [value for value in array.tolist() if not isinstance(value, str | int)]:
                raise HoldfastError(f"{where}: expected a name or a whole number each, got {wrong[0]!r}")
            array = array.astype(str)
        else:
            array = as_owners(where, array).numpy()
        names, of_row = np.unique(array, return_inverse=True)
        return cls(of_row.astype(np.int64), tuple(map(str, names.tolist())))

    def among(self, where: str, known: Sequence[str], do: str) -> np.ndarray:
        """[N] int64: positions of the rows' groups in ``known``; ``do``: what to do if one is not there."""
        for name in self.names:
            if name not in known:
                raise HoldfastError(f"{where}: {name!r} is not among {', '.join(map(repr, known))}; {do}")
        places: np.ndarray = np.array([list(known).index(name) for name in self.names], dtype=np.int64)
        return places.take(self.of_row)
