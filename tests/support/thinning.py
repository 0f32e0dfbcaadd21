"""Long lists of cases: some stay in the quick suite, all of them run with `make test-slow` beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int, spread: bool = False) -> list[Any]:
    """``cases`` for ``parametrize``, all but each ``every``-th of them slow; ``spread``: each is a tuple."""
    return [
        pytest.param(*(case if spread else (case,)), marks=[] if i % every == 0 else [pytest.mark.slow])
        for i, case in enumerate(cases)
    ]
