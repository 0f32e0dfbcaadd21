"""What is written down about membership, and what is made of files and decisions that others have written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from federation_runs import describe
from pydantic import BaseModel

from holdfast.core.errors import HoldfastError
from holdfast_deploy import keys
from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.federation_file import FederationFile, make_federation
from holdfast_deploy.membership.agreement import Decision, Signed, Vote
from holdfast_deploy.membership.kept_models import KeptModels
from holdfast_deploy.membership.log import MembershipLog, read_decisions
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest, check_vote, sign_vote
from holdfast_deploy.membership.roster import AvailableModels, Order, Roster, first_roster, roster_folder
from holdfast_deploy.storage.messages import Header, specs
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials, serial_of
from holdfast_deploy.wire.revocations import Revoked, revoke
from holdfast_deploy.wire.signatures import check_signature, signature_of

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}

# As version 0.1 wrote it, which called rosters epochs.
EPOCHS = (
    '{"incarnation":"00112233445566aa","registered":true,"known":{"b":"00112233445566bb"},"epoch":0,'
    '"vote":{"number":1,"promised":[0,""],"ballot":[0,""],"value":null},"order":null}\n'
)


def federation() -> FederationFile:
    return make_federation(describe(GECL, 3, 20, membership={"remove_after": "1min"}), "test")


def without_c(file: FederationFile) -> Decision:
    nodes = first_roster(file).nodes[:2]
    roster = Roster(number=1, first=2, nodes=nodes)
    return Decision(roster=roster, ballot=(1, "a"), votes={"a": Signed(), "b": Signed()})


def test_a_folder_of_an_earlier_version_is_refused_in_a_line_and_left_as_it_is(tmp_path: Path) -> None:
    path, file = tmp_path / "memory.json", federation()
    path.write_text(EPOCHS)
    for open_folder in (read_decisions, partial(MembershipLog, file, None)):
        with pytest.raises(HoldfastError, match="was written by an earlier version of holdfast: finish"):
            open_folder(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory.json"]
    assert path.read_text() == EPOCHS


def test_promises_votes_and_decisions_are_there_after_a_crash(tmp_path: Path) -> None:
    file = federation()
    log, decision = MembershipLog(file, None, tmp_path), without_c(file)
    assert log.promise((3, "b"))
    assert log.cast((3, "b"), decision.roster) is not None
    again = MembershipLog(file, None, tmp_path)
    assert (again.memory, again.vote.value) == (log.memory, decision.roster)
    assert again.pending
    assert not again.promise((2, "a"))
    assert again.cast((2, "a"), decision.roster) is None
    assert again.follow([decision])
    last = MembershipLog(file, None, tmp_path)
    assert last.roster == decision.roster
    assert (last.voters, last.federation.names, last.pending) == (["a", "b"], ["a", "b"], False)


def test_in_memory_a_log_follows_decisions_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, decision = federation(), without_c(federation())
    log = MembershipLog(file, None)
    lonely = decision.model_copy(
        update={
            "votes": {"a": Signed(), "c": Signed()},
            "roster": Roster(number=1, first=2, nodes=[NodeConfig(name="x")]),
        }
    )
    with pytest.raises(HoldfastError, match="nobody has ordered 'x' to be added"):
        log.follow([lonely])
    few = decision.model_copy(update={"votes": {"a": Signed()}})
    with pytest.raises(HoldfastError, match="no majority has voted for it"):
        log.follow([few])
    assert log.follow([decision])
    assert not log.follow([decision])
    assert log.roster.names == ["a", "b"]
    assert list(log.former) == ["c"]
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_being_written_while_the_next_roster_is_decided_removes_none(tmp_path: Path) -> None:
    """The member is ahead of the border by some rounds: it has promised to keep the border's model."""
    file = federation()
    log = MembershipLog(file, None, tmp_path / "membership")
    kept = KeptModels(roster_folder(tmp_path, 0), 0, partial(log.pinned, 0), file.limits)

    def keep(round: int) -> None:
        row = torch.zeros(2)
        tensors = specs(row)
        header = Header(federation=file.id, sender="a", round=round, exchange=0, tensors=tensors)
        kept.keep(header, row)

    keep(1)
    keep(2)
    assert kept.rounds == [2]
    assert log.promise((1, "a"))
    keep(3)
    assert kept.rounds == [2, 3]
    assert log.follow([without_c(file)])
    keep(4)
    assert kept.rounds == [2, 3, 4]


def test_a_vote_counts_whichever_of_two_authorities_of_one_name_has_vouched_for_it(tmp_path: Path) -> None:
    """While an organisation changes to a new authority, members trust the old one, too."""
    for place in ("old", "new"):
        make_certificates(tmp_path / place, "test", ["a", "b"], days=1)
    path = tmp_path / "new" / "ca.crt"
    path.write_bytes((tmp_path / "old" / "ca.crt").read_bytes() + path.read_bytes())
    new, old = load_credentials(tmp_path / "new", "a"), load_credentials(tmp_path / "old", "b")
    roster = Roster(number=1, first=2, nodes=[NodeConfig(name=name) for name in "ab"])
    decision = Decision(roster=roster, ballot=(1, "a"), votes={})
    for name, credentials in (("a", new), ("b", old)):
        check_vote(new, "digest", name, sign_vote(credentials, "digest", (1, "a"), roster), decision)
    with pytest.raises(HoldfastError, match="is not signed by it"):
        check_vote(old, "digest", "a", sign_vote(new, "digest", (1, "a"), roster), decision)


def test_a_vote_outlasts_the_certificate_that_signed_it_and_other_signatures_do_not(tmp_path: Path) -> None:
    """A vote says nothing about its time, so a decision of a year ago can still be checked."""
    coordinator = keys.public_key(keys.make_key(tmp_path))
    make_certificates(tmp_path, "test", ["a", "b"], days=1)
    a, b = (load_credentials(tmp_path, name, coordinator) for name in "ab")
    roster = Roster(number=1, first=2, nodes=[NodeConfig(name=name) for name in "ab"])
    decision = Decision(roster=roster, ballot=(1, "a"), votes={})
    vote, signature = sign_vote(a, "digest", (1, "a"), roster), signature_of(a, b"text")
    check_signature(b, "a", a.certificate, signature, b"text")
    with pytest.raises(ValueError, match="its certificate is not b's"):
        check_signature(b, "b", a.certificate, signature, b"text")
    revoke(tmp_path, Revoked(serial=serial_of(a.certificate), name="a", time="2026-01-01"), coordinator)
    assert b.refresh(coordinator)
    with pytest.raises(ValueError, match="not signed by a for this federation"):
        check_signature(b, "a", a.certificate, signature, b"text")
    check_vote(b, "digest", "a", vote, decision)


@pytest.mark.parametrize(("model", "title"), [(MembershipRequest, "a request"), (MembershipReply, "a reply")])
def test_the_page_names_every_field_that_members_send(model: type[BaseModel], title: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "membership.md").read_text()
    table = page.split(f"| field of {title} | what |\n|---|---|\n")[1].split("\n\n")[0]
    assert [row.split("`")[1] for row in table.splitlines()] == list(model.model_fields)


@pytest.mark.parametrize("model", [Roster, Order, Decision, Vote, AvailableModels, Signed])
def test_the_page_names_every_field_within(model: type[BaseModel]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "membership.md").read_text()
    section = page.split("## What members ask one another")[1].split("\n## ")[0]
    assert [name for name in model.model_fields if f"`{name}`" not in section] == []
