"""Strangers who fail the TLS handshake never reach our code; gRPC only mentions them on standard error.

gRPC for Python has no hook for that, takes no socket that we have accepted, and writes its log to file
descriptor 2 alone. So the commands that run a member or a relay, and nothing else, read that descriptor.
Members in a program of one's own do not, and importing holdfast changes neither descriptors nor environment.
Two other ways are worse. A TLS listener of our own in front of gRPC would double what sending costs: see
"Choices" in docs/reference/wire.md. A second process, whose standard error the first one reads, would stand
between the member and whoever stops or supervises it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import printable
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.tls import TRIALS

REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "certificate has expired": "an expired certificate",
    "certificate is not yet valid": "a certificate that is not valid yet",
    "CERTIFICATE_VERIFY_FAILED": "a certificate of another authority",
    "certificate signature failure": "a certificate of another authority",  # of the same name
    "NO_SHARED_CIPHER": "TLS older than 1.3",
    "UNSUPPORTED_PROTOCOL": "TLS older than 1.3",
    "HTTP_REQUEST": "no TLS",
    "WRONG_VERSION_NUMBER": "no TLS",
    "BAD_DECRYPT": "damaged or repeated bytes",
}


@contextmanager
def watch_handshakes(events: Events, *, plain: bool = True) -> Iterator[None]:
    """Turns gRPC's remarks about refused handshakes into log entries; all else passes through.

    Unless ``plain``, that becomes log entries, too, so that every line of the log is one.

    As many about an old version of TLS are not a stranger's as this process has tried itself, see ``tls``.
    """
    own_trials = len(TRIALS)  # that gRPC has remarked on
    terminal, python_stderr = os.dup(2), sys.stderr
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)
    sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1)  # what Python writes goes straight on

    def watch() -> None:
        nonlocal own_trials
        with os.fdopen(read_end, errors="replace") as remarks:
            for line in remarks:
                if "Handshake failed" in line:
                    reason = _reason(line)
                    if reason == REASONS["NO_SHARED_CIPHER"] and own_trials < len(TRIALS):
                        own_trials += 1
                    else:
                        events.complain("handshake refused", reason=reason)
                else:
                    # gRPC, a library or a warning; gRPC may quote what a peer has sent.
                    text = printable(line.rstrip())
                    if plain:
                        os.write(terminal, f"{text}\n".encode())
                    elif text:
                        events.log("said", "info", text=text)

    watcher = threading.Thread(target=watch, name="handshakes", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = python_stderr
        os.dup2(terminal, 2)  # closes the last write end, so the watcher comes to its end
        watcher.join(timeout=1.0)
        os.close(terminal)


def _reason(line: str) -> str:
    for mark, reason in REASONS.items():
        if mark in line:
            return reason
    # Without what differs from time to time, so that the same remark is logged once.
    return re.sub(r".*(Handshake failed|OPENSSL_internal:)", "", line.strip()).strip(" :")[:120]
