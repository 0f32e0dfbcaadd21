"""Sealed frames open at their place only, and cards are believed only from those who signed them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from holdfast_deploy.relay.parcels import Parcel, stamp, unstamp
from holdfast_deploy.relay.sealing import Card, Identity, SealError, Session, new_identity
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials

FEDERATION = "0" * 32
QUESTION = b"q" * 32


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, "test", ["a", "b", "c"], days=1)
    return folder


def identity(certs: Path, name: str, federation: str = FEDERATION) -> Identity:
    return new_identity(federation, name, load_credentials(certs, name))


def sessions(asker: Identity, answerer: Identity) -> tuple[Session, Session]:
    return asker.session(answerer.card, asks=True), answerer.session(asker.card, asks=False)


def test_both_ends_have_the_same_two_keys(certs: Path) -> None:
    a, b = sessions(identity(certs, "a"), identity(certs, "b"))
    assert a == b
    assert a.question_key != a.answer_key
    sealed = a.seal_question(1, 0, True, b"what")
    assert b"what" not in sealed
    assert b.open_question(1, 0, True, sealed) == b"what"
    answer = b.seal_answer(1, 0, False, b"that", QUESTION)
    assert a.open_answer(1, 0, False, answer, QUESTION) == b"that"


def test_a_frame_opens_at_its_own_place_only(certs: Path) -> None:
    own_a, own_b, own_c = (identity(certs, name) for name in "abc")
    a, b = sessions(own_a, own_b)
    question, answer = a.seal_question(2, 3, False, b"x"), b.seal_answer(2, 3, False, b"x", QUESTION)
    restarted = sessions(own_a, identity(certs, "b"))[1]
    reversed_roles = sessions(own_b, own_a)[0]
    elsewhere = sessions(identity(certs, "a", "1" * 32), identity(certs, "b", "1" * 32))[1]
    wrong = [
        lambda: b.open_question(1, 3, False, question),  # another call: replayed
        lambda: b.open_question(2, 2, False, question),  # another frame: reordered
        lambda: b.open_question(2, 3, True, question),  # cut off
        lambda: a.open_answer(2, 3, False, question, QUESTION),  # sent back
        lambda: b.open_question(2, 3, False, answer),
        lambda: reversed_roles.open_question(2, 3, False, question),
        lambda: restarted.open_question(2, 3, False, question),  # for a process that is gone
        lambda: sessions(own_a, own_c)[1].open_question(2, 3, False, question),  # for somebody else
        lambda: elsewhere.open_question(2, 3, False, question),  # in another federation
        lambda: a.open_answer(2, 3, False, answer, b"p" * 32),  # to another question
        lambda: b.open_question(2, 3, False, question[:-1] + bytes([question[-1] ^ 1])),
        lambda: b.open_question(2, 3, False, b""),
    ]
    for attempt in wrong:
        with pytest.raises(SealError, match="a sealed frame was changed, or is not for this place"):
            attempt()
    assert b.open_question(2, 3, False, question) == b"x"


def text(card: Card, **changes: object) -> bytes:
    return card.model_copy(update=changes).model_dump_json().encode()


def test_only_a_members_own_card_is_believed(certs: Path, tmp_path: Path) -> None:
    a, b, c = (identity(certs, name) for name in "abc")
    assert a.check(text(b.card), "b") == b.card
    make_certificates(tmp_path, "test", ["b"], days=1)  # another authority of the same name
    stranger = new_identity(FEDERATION, "b", load_credentials(tmp_path, "b")).card
    other_key = base64.b64encode(bytes(31) + b"\x01").decode()
    bad = {
        "another member's": (text(c.card), "expected b's, got 'c'"),
        "under another name": (text(c.card, name="b"), "not signed by b"),
        "with another key": (text(b.card, key=other_key), "not signed by b"),
        "with c's certificate": (text(b.card, certificate=c.card.certificate), "not signed by b"),
        "of another authority": (text(stranger), "not signed by b"),
        "of another federation": (text(identity(certs, "b", "1" * 32).card), "not signed by b"),
        "backdated": (text(b.card, issued=b.card.issued - 1), "not signed by b"),
        "old": (text(b.card, issued=b.card.issued - 10**6), "too old"),
        "nonsense": (b"{}", "not a valid card"),
    }
    for kind, (card, complaint) in bad.items():
        with pytest.raises(Exception, match=complaint) as refused:
            a.check(card, "b")
        assert "HoldfastError" in str(type(refused.value).__mro__), kind


def test_parcels_come_out_as_they_went_in() -> None:
    parcel = Parcel(7, 2**40, b"sealed", answers=True, last=True, card=b"card")
    assert unstamp(stamp("a", "f" * 32, parcel.pack())) == ("a", "f" * 32, parcel.pack())
    assert Parcel.unpack(parcel.pack()) == parcel
    for content in (b"", b"\x01", b"\xff" * 40):
        with pytest.raises(Exception, match="parcel"):
            unstamp(content)
