"""Which source reads which kind of data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.data.lazy import AnyData, LazyData, Stream
from holdfast.problem.lazy_source import LazySource, StreamSource
from holdfast.problem.source import ArraySource, Source


def source_of(data: AnyData, like: Tensor, seed: int, word: Word, options: Any) -> Source:
    """``data`` as a source for a model like ``like``; ``word``: the seed, on the device where that helps.

    ``options``: see ``SourceOptions``.
    """
    if isinstance(data, LazyData):
        return LazySource(data, like, seed=seed, **options)
    if not isinstance(data, Stream):
        return ArraySource(data, like, seed=word, **options)
    if options.get("batch_size", 0) is None:
        raise HoldfastError("batch_size = 'full': a Stream has no end; its function says how many samples")
    for name, default in (("weights", "uniform"), ("sampling", "replacement")):
        if options.get(name, default) != default:
            raise HoldfastError(f"{name} = {options[name]!r}: a Stream has no samples to count or draw from")
    kept = {name: options[name] for name in ("mean", "std") if name in options}
    return StreamSource(data, like, seed=seed, **kept)
