"""While a member runs, its certificates and the list of revoked ones may change, and time goes by."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.credentials import Credentials

WATCH = 1.0  # seconds between two looks at the certificates' files
WARN_DAYS, DAY = 30.0, 86400.0  # before a certificate expires; seconds between warnings


async def watch_certificates(
    credentials: Credentials, coordinator: str | None, events: Events, changed: Callable[[], None]
) -> None:
    """Takes up new files, and lists that others sent, and calls ``changed`` then; never ends.

    Writes down what was revoked, and warns of a certificate that expires soon.
    """
    warned, problem, left = -math.inf, "", math.inf
    version, looked, kept = credentials.version, -1, -1
    _warn_of_open_keys(credentials, events)
    while True:
        before, problem = problem, ""
        try:
            credentials.refresh(coordinator)
            if kept != credentials.version:
                credentials.keep_seen(coordinator)
                kept = credentials.version
        except (HoldfastError, OSError) as error:
            problem = str(error)
            if problem != before:  # else it would be one line a second
                events.log("certificates not reloaded", "warning", reason=problem)
        if version != credentials.version:
            version, warned = credentials.version, -math.inf
            events.log("certificates reloaded", revoked=len(credentials.revocations.revoked))
            changed()
        if looked != version and (lacks := credentials.revocations.left_out):
            events.log("a list of revoked certificates lacks some", "warning", reason=lacks)
        looked = version
        left_before, left = left, credentials.days_left
        expired = left <= 0 < left_before  # since the last look
        if left < WARN_DAYS and (expired or time.monotonic() - warned > DAY):
            warned = time.monotonic()
            advice = "renew it with 'holdfast federation csr' and 'sign'"
            if left > 0:
                events.log("certificate expires soon", "warning", days=round(left, 1), reason=advice)
            else:
                reason = f"open connections last, new ones are refused; {advice}"
                events.log("certificate has expired", "error", reason=reason)
        await asyncio.sleep(WATCH)


def _warn_of_open_keys(credentials: Credentials, events: Events) -> None:
    """Whoever reads a key is that member. Not refused: where secrets are mounted, modes may mean little."""
    for path in sorted(credentials.folder.glob("*.key")) if credentials.folder is not None else []:
        with suppress(OSError):  # gone meanwhile
            if path.stat().st_mode & 0o077:
                events.log("a key is not private", "warning", reason=f"others can read it: chmod 600 {path}")
