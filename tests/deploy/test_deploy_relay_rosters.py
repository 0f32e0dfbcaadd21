"""Members that only dial out come and go, too: they agree through the relay, and go on through it."""

from __future__ import annotations

from pathlib import Path

import pytest
from federation_runs import PATIENCE
from relay_runs import relayed, relaying
from roster_runs import Threads
from test_deploy_rosters import GECL, KEY, changing, drop_in, order

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.membership import service


def test_members_behind_a_relay_go_on_without_one_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a and b have no ports; c has one, but only to dial out to them."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 3, 8, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw = relayed(raw | {"membership": {}}, "ab", links=[["a", "c"]])
    threads = Threads(make_federation(raw, "test"), tmp_path)
    with relaying(threads) as relay:
        for name in "abc":
            threads.start(name)
        threads.hold(3)
        drop_in(threads, "b", order(threads, "remove", "c"))
        threads.agreed(1)
        passed = relay.bytes
        threads.limit = 9
        threads.threads.pop("c").join(PATIENCE)
        assert str(threads.errors.pop("c")).startswith("the coordinator has removed c after round")
        threads.end()
        assert relay.bytes > passed + 5000
    (roster,) = threads.check("ab")
    assert roster.names == ["a", "b"]
    assert not [entry for entry in threads.log if entry["event"] == "handshake refused"]
