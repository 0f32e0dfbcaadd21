"""What gRPC tells about a caller, before anything is believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.wire.protocol import LARGEST_FRAME, MODEL_KEY, NAME_KEY, SILENCE

Frames = AsyncIterator[bytes]


def caller_name(context: Any, secure: bool) -> str:
    """The name in the caller's certificate, or without certificates the name it gives; "" if it has none."""
    if secure:
        names = context.auth_context().get("x509_subject_alternative_name", [])
    else:
        metadata = context.invocation_metadata() or ()
        names = [str(value).encode() for key, value in metadata if key == NAME_KEY]
    return str(names[0].decode(errors="replace")) if len(names) == 1 else ""


def caller_model(context: Any) -> str:
    """What the caller says about a model of its own; "" if it has none."""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == MODEL_KEY), "")


async def first_frame(frames: Frames) -> bytes:
    """The first frame, which says what is wanted, or what follows."""
    async with asyncio.timeout(SILENCE):
        async for frame in frames:
            return frame
    raise HoldfastError(f"nothing, or a frame above {LARGEST_FRAME} bytes")
