"""JSON that every program can read."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(content: Any, indent: int | None = None) -> str:
    """``content`` as JSON, which has no NaN and no infinity: they become null."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=indent)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
