"""Marks for tests that need a GPU: they run where there is one, and `make test-gpu` runs only them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(test: Any) -> Any:
    """Decorator: the test needs a GPU."""
    return pytest.mark.gpu(_NEEDS_GPU(test))


GPU_MARKS = [pytest.mark.gpu, _NEEDS_GPU]
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU_MARKS)])
