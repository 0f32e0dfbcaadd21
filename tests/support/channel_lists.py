"""Which channels a test's list leaves out."""

from __future__ import annotations

from collections.abc import Iterable

import holdfast as hf
from holdfast.channels import CHANNELS


def untried(channels: Iterable[hf.Channel]) -> set[str]:
    """The names of the channels of holdfast that ``channels`` do not have, not even as a part of a chain."""
    parts = [part for c in channels for part in (c, *(c.parts if isinstance(c, hf.Chain) else ()))]
    tried = {type(part) for part in parts} | {hf.Identity}
    ours = [name for name in CHANNELS if CHANNELS[name].__module__.startswith("holdfast.")]
    return {name for name in ours if CHANNELS[name] not in tried}
