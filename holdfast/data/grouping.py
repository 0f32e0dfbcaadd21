"""Groups named by numbers or words, such as the hospital that a sample comes from."""

from __future__ import annotations

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
