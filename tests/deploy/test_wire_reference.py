"""docs/reference/wire.md is complete: a member written from it takes part, and is refused as it says."""

from __future__ import annotations

import ast
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import second_implementation
import torch
from federation_runs import PATIENCE, DeployedRun, describe
from second_implementation import PIECE, SecondMember, SecondProcess

from holdfast.data.dataset import Dataset
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.relay.calls import HEAD, Head
from holdfast_deploy.relay.parcels import Parcel
from holdfast_deploy.relay.sealing import new_identity
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials

INPUTS, CLASSES, ROUNDS = 3000, 100, 3  # a model of more than one piece
DIM = (INPUTS + 1) * CLASSES


def few_samples(node: int) -> Dataset:
    x, y = torch.ones(1, INPUTS), torch.tensor([node])
    return Dataset(x, y, x[:0], y[:0], classes=CLASSES)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[DeployedRun, SecondMember]]:
    """Node a of holdfast, and b of the second implementation."""
    raw = describe(
        {"name": "gossip", "lr": 1e-30},  # so small that a step changes no number
        nodes=2,
        rounds=ROUNDS,
        network={"topology": "line"},
        problem={"input_shape": [INPUTS], "classes": CLASSES, "model": "linear", "batch_size": 1},
    )
    run = DeployedRun(make_federation(raw, "test"), tmp_path, data_of=few_samples)
    member = run.members["a"] = run.member("a")
    certs, ports = tmp_path / "certs", [int(node["address"].rpartition(":")[2]) for node in raw["node"]]
    tls = [(certs / file).read_bytes() for file in ("b.key", "b.crt", "ca.crt")]
    x0 = member.x0.numpy().tobytes()
    start = hashlib.sha256(f"torch.float32 [{DIM}]".encode() + x0).hexdigest()[:16]
    agreed = {"federation": run.federation.id, "start": start}
    second = SecondMember("b", ports[1], "a", f"127.0.0.1:{ports[0]}", agreed, tls)
    yield run, second
    second.close()
    member.close()


def test_the_second_implementation_knows_nothing_of_holdfast() -> None:
    tree = ast.parse(Path(second_implementation.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("holdfast") for name in imported)


def test_it_takes_part_from_the_first_round_to_the_farewell(pair: tuple[DeployedRun, SecondMember]) -> None:
    run, second = pair
    x = np.random.default_rng(0).standard_normal((1, DIM), dtype=np.float32)
    theirs = run.members["a"].x0.numpy()[None].copy()  # a lets go of it as soon as it has begun
    node = threading.Thread(target=run._run, args=["a"], daemon=True)
    node.start()
    for round in range(1, ROUNDS + 1):
        received = second.exchange(round, x, break_off=round == 2)
        np.testing.assert_array_equal(received, theirs)  # and so a has used what it got in the round before
        x = theirs = np.float32(0.5) * received + np.float32(0.5) * x
    second.part(ROUNDS + 1)
    node.join(PATIENCE)
    assert not run.errors
    np.testing.assert_array_equal(run.models["a"].numpy(), theirs[0])
    log = [json.loads(line) for line in (run.folder / "a" / "audit.jsonl").read_text().splitlines()]
    sent = [entry for entry in log if entry["event"] == "sent" and entry["round"] == 2]
    assert len(sent) == 2  # what broke off was asked for again ...
    assert run.members["a"].service.bytes_served < ROUNDS * 4 * DIM + PIECE  # ... from where it did


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"federation": "0" * 32}, "FAILED_PRECONDITION"),
        ({"start": "0" * 16}, "FAILED_PRECONDITION"),
        ({"depends_on": {"a": "0" * 16}}, "ABORTED"),
        ({"depends_on": {"nobody": "0" * 16}}, "INVALID_ARGUMENT"),
        ({"round": ROUNDS + 2}, "INVALID_ARGUMENT"),
        ({"more": 1}, "INVALID_ARGUMENT"),
        ({"passed": [{"round": -1}]}, "INVALID_ARGUMENT"),
    ],
)
def test_it_is_refused_as_the_page_says(
    changes: dict[str, Any], code: str, pair: tuple[DeployedRun, SecondMember]
) -> None:
    _, second = pair
    with pytest.raises(grpc.RpcError) as refused:
        next(second.ask(**{"round": 1, **changes}))
    assert refused.value.code().name == code


def test_its_sealed_questions_open_and_it_opens_the_answers(tmp_path: Path) -> None:
    make_certificates(tmp_path, "test", ["a", "b"], days=1)
    key, certificate = ((tmp_path / f"b.{ending}").read_bytes() for ending in ("key", "crt"))
    a = new_identity("f" * 32, "a", load_credentials(tmp_path, "a"))
    card = a.card.model_dump_json().encode()
    b = SecondProcess("f" * 32, "b", key, certificate)
    packed, question = b.first_frame("a", card, "Fetch", b"what?")
    parcel = Parcel.unpack(packed)
    session = a.session(a.check(parcel.card, "b"), asks=False)
    plain = session.open_question(parcel.call, parcel.frame, parcel.last, parcel.sealed)
    (length,) = HEAD.unpack_from(plain)
    assert Head.model_validate_json(plain[2 : 2 + length]).kind == "Fetch"
    assert plain[2 + length :] == b"what?"
    sealed = session.seal_answer(1, 3, False, b"that", question)
    assert b.open_answer("a", card, Parcel(1, 3, sealed, answers=True).pack(), question) == (3, b"that")
