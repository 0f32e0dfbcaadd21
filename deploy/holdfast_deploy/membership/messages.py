"""What members say to one another about who takes part, and how a vote is signed."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.membership.agreement import Ballot, Decision, Signed, Vote
from holdfast_deploy.membership.roster import AvailableModels, Checked, Order, Roster
from holdfast_deploy.storage.messages import Number
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.signatures import check_past_signature, signature_of

MOST_DECISIONS = 2  # in one answer; a member that is further behind asks again


class MembershipRequest(Checked):
    """What a member asks: whether there is anything new, for a promise, or for a vote."""

    federation: str = Field(max_length=64)  # the digest of the file
    roster: Number  # where the asker is
    incarnation: str = Field(pattern="^([0-9a-f]{16})?$")  # of its folder; "": it only looks on
    kind: Literal["hello", "promise", "vote"] = "hello"
    ballot: Ballot = (0, "")
    value: Roster | None = None  # what to vote for
    order: Order | None = None  # the coordinator's latest
    broken: bool = False  # the asker's files are beyond repair: it can continue in another roster only
    decision: Decision | None = None  # about what follows the asker's roster; it need not be asked for then


class MembershipReply(Checked):
    """What it is answered."""

    roster: Number  # where the member that answers is
    decisions: list[Decision] = Field(default=[], max_length=MOST_DECISIONS)  # after the asker's roster
    known: str = ""  # the incarnation of the asker that is known here
    order: Order | None = None
    granted: bool = False  # the promise, or the vote
    vote: Vote | None = None  # as it is written down now
    available: AvailableModels | None = None
    signed: Signed = Signed()


# --- votes are signed, so that a decision can be shown to others --------------------------------------------


def _document(federation: str, ballot: Ballot, roster: Roster) -> bytes:
    """All of ``roster``, also its order, and addresses that the order gives."""
    whole = hashlib.sha256(roster.model_dump_json().encode()).hexdigest()
    return f"holdfast vote {federation} {ballot[0]} {ballot[1]} {whole}".encode()


def sign_vote(credentials: Credentials | None, federation: str, ballot: Ballot, roster: Roster) -> Signed:
    """The vote for ``roster``, with the member's own key."""
    if credentials is None:
        return Signed()
    signature = signature_of(credentials, _document(federation, ballot, roster))
    return Signed(certificate=credentials.certificate.decode(), signature=signature.hex())


def check_vote(
    credentials: Credentials | None, federation: str, name: str, signed: Signed, decision: Decision
) -> None:
    """Refuses what is not the vote of the member called ``name``; its certificate may have expired since."""
    if credentials is None:
        return
    document = _document(federation, decision.ballot, decision.roster)
    try:
        certificate, signature = signed.certificate.encode(), bytes.fromhex(signed.signature)
        check_past_signature(credentials, name, certificate, signature, document)
    except ValueError:
        raise HoldfastError(
            f"roster {decision.roster.number}: the vote of {name!r} is not signed by it"
        ) from None
