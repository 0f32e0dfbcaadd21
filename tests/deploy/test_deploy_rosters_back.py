"""All go back to an earlier round, or on with one whose files are rotten: by themselves, in a new roster."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from federation_runs import PATIENCE
from roster_runs import Threads
from test_deploy_damage import flip
from test_deploy_rosters import GECL, KEY, changing, drop_in, order

from holdfast_deploy import keys
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.membership import service
from holdfast_deploy.membership.roster import Order

SCAFFOLD = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
SERVER = {"network": {"topology": "server"}}


def members(folder: Path, algorithm: dict[str, Any], rounds: int, **changes: Any) -> Threads:
    """Three of them, who keep the models of every fourth round."""
    limits = {"wait": 90.0, "snapshot_every": 4, "snapshots": 2}
    raw = changing(algorithm, 3, rounds, coordinator=KEY.public_key().public_bytes_raw().hex(), **changes)
    return Threads(make_federation(raw | {"membership": {}, "limits": limits}, "test"), folder)


def rollback(threads: Threads, to: int, roster: int = 0) -> Order:
    wanted = Order(federation=threads.file.id, roster=roster, change="rollback", to=to)
    return wanted.model_copy(update={"signature": keys.sign("membership", wanted.document, KEY)})


def test_all_go_back_to_an_earlier_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to one of the roster before; figures of rounds that were done again stand in metrics.csv once."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    threads = members(tmp_path, GECL, 11)
    for name in "abc":
        threads.start(name)
    threads.hold(9)
    drop_in(threads, "b", rollback(threads, 8))
    threads.agreed(1)
    threads.hold(10)
    drop_in(threads, "c", rollback(threads, 4, roster=1))
    threads.agreed(2)
    threads.limit = 12
    threads.end()
    rosters = threads.check("abc")
    assert [(roster.first, roster.joined) for roster in rosters] == [(8, []), (4, [])]
    rows = list(csv.DictReader((tmp_path / "a" / "metrics.csv").open()))
    assert [int(row["round"]) for row in rows] == list(range(12))


@pytest.mark.slow
def test_a_server_goes_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    threads = members(tmp_path, SCAFFOLD, 9, **SERVER)
    for name in ["hub", *"abc"]:
        threads.start(name)
    threads.hold(7)
    drop_in(threads, "hub", rollback(threads, 4))
    threads.agreed(1)
    threads.limit = 10
    threads.end()
    (roster,) = threads.check("abc")
    assert roster.first == 4


@pytest.mark.parametrize("models", ["intact", pytest.param("rotten, too", marks=pytest.mark.slow)])
def test_a_member_whose_states_are_rotten_goes_on_by_itself(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its own model, if that is intact, or from its neighbour's."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    threads = members(tmp_path, GECL, 10)
    for name in "abc":
        threads.start(name)
    threads.hold(5)
    threads.stop("c")
    rotten = [tmp_path / "c" / name for name in ("state", "state.previous")]
    rotten += [] if models == "intact" else (tmp_path / "c" / "models").iterdir()
    for path in rotten:
        flip(path, -3)
    threads.limit = 11
    threads.start("c")
    threads.end()
    (roster,) = threads.check("abc")
    assert (roster.names, roster.joined) == (["a", "b", "c"], [] if models == "intact" else ["c"])
    assert any("neither" in str(entry.get("reason")) for entry in threads.log)


@pytest.mark.slow
def test_a_lost_decision_is_told_by_others_before_anybody_votes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    threads = members(tmp_path, GECL, 10)
    for name in "abc":
        threads.start(name)
    threads.hold(3)
    drop_in(threads, "a", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.hold(5)
    threads.stop("b")
    path = tmp_path / "b" / "membership" / "roster-1.json"
    written = path.read_bytes()
    path.write_bytes(written[:-9])
    threads.limit = 11
    threads.start("b")
    threads.threads.pop("c").join(PATIENCE)
    threads.errors.pop("c")
    threads.end()
    threads.check("ab")
    assert path.read_bytes() == written
