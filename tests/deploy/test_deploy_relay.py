"""Nodes that only dial out: through a relay that cannot read, the model is, bit for bit, the direct run's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import DeployedRun, Started, calm_run, describe
from relay_runs import relayed, relaying

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.relay.relay import End, Relay
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dial import Unreachable, reach_relay

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[list[str]]]] = {
    "all dial out": (GECL, {}, "abc", []),
    "one dials out": (GECL, {"nodes": 4}, "c", []),
    "some links relayed": (GECL, {}, "", [["a", "b"]]),
    "sporadic": (
        {"name": "dspodfl", "lr": 0.1},
        {"network": {"topology": "ring", "links": 0.5, "compute": 0.5}},
        "ab",
        [],
    ),
    "server behind the relay": (
        {"name": "scaffold", "lr": 0.1, "local_steps": 2},
        {"network": {"topology": "server", "cohort": 2}},
        "abc",
        [["hub", "a"], ["hub", "b"]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_through_a_relay_the_models_are_those_of_the_direct_run(case: str, tmp_path: Path) -> None:
    algorithm, changes, outgoing, links = CASES[case]
    direct = describe(algorithm, **changes)
    calm = calm_run(direct)
    run = DeployedRun(make_federation(relayed(direct, outgoing, links), "test"), tmp_path)
    assert run.federation.id == calm.federation.id
    with relaying(run) as relay:
        run.carry_out()
        assert relay.joined > 0
    assert not run.errors
    for name, model in calm.models.items():
        assert torch.equal(run.models[name], model)
    assert not [entry for entry in run.log if entry["level"] == "error"]


def test_a_relay_that_loses_everything_again_and_again_changes_nothing(tmp_path: Path) -> None:
    direct = describe(GECL, rounds=12)
    calm = calm_run(direct)
    run = DeployedRun(make_federation(relayed(direct, "abc"), "test"), tmp_path)
    started = Started(run)
    for stop in (3, 8):
        with relaying(run):
            started.until(lambda stop=stop: max(member.done for member in run.members.values()) >= stop)
    with relaying(run):
        started.end()
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


class EvilEnd(End):
    """Repeats, changes, drops and reflects what passes, all drawn from a seed."""

    draw, tricks = random.Random(0), 0

    def data_received(self, data: bytes) -> None:
        trick = EvilEnd.draw.randrange(80) if self.other is not None else -1
        EvilEnd.tricks += 0 <= trick < 5
        if trick == 0:  # once more
            super().data_received(data)
        elif trick == 1:
            at = self.draw.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self.draw.randrange(8)]) + data[at + 1 :]
        elif trick == 2:
            return
        elif trick == 3:
            self.transport.write(data)
        elif trick == 4:
            data = data[: self.draw.randrange(len(data))]
        super().data_received(data)


class EvilRelay(Relay):
    """Spoils what passes."""

    def end(self) -> End:
        return EvilEnd(self)


def test_an_evil_relay_can_delay_but_not_deceive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("line", "protocol"):
        monkeypatch.setattr(f"holdfast_deploy.wire.{module}.SILENCE", 2.0)  # what it lost is soon asked again
    for module in ("dial", "listener", "relayed"):
        monkeypatch.setattr(f"holdfast_deploy.wire.{module}.HANDSHAKE", 2.0)
    monkeypatch.setattr("holdfast_deploy.wire.service.PATIENCE", 0.5)
    direct = describe(GECL, rounds=6)
    calm = calm_run(direct)
    run = DeployedRun(make_federation(relayed(direct, "abc"), "test"), tmp_path)
    with relaying(run, EvilRelay):
        run.carry_out()
    assert EvilEnd.tricks > 10
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


def test_strangers_cannot_use_the_relay(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(relayed(describe(GECL), "abc"), "test"), tmp_path)
    other = DeployedRun(run.federation, tmp_path / "other").credentials("a")
    own = run.credentials("relay")  # of the federation's authority, but no member's
    assert run.federation.relay is not None
    stranger = replace(other, authority=own.authority)

    async def say(credentials: Credentials, verb: str) -> bytes:
        relay = run.federation.relay
        assert relay is not None
        transport, said = await reach_relay(relay.name, relay.address, credentials, verb)
        try:
            return await asyncio.wait_for(said.until(b"\n"), 20)
        finally:
            transport.abort()

    with relaying(run):
        for verb in ("LISTEN\n", "CALL a\n", f"ACCEPT {'0' * 32}\n"):
            assert asyncio.run(say(own, verb)) == b"NO not a member of the federation"
            with pytest.raises((EOFError, OSError, Unreachable)):
                asyncio.run(say(stranger, verb))


@pytest.mark.parametrize(
    ("relay", "complaint"),
    [
        ({"name": "relay"}, "relay: everybody has to reach it"),
        ({"name": "relay", "address": "h:1", "links": [["a", "z"]]}, "relay.links: 'z' is not a member"),
        ({"name": "a", "address": "h:1"}, "the name 'a' is taken twice"),
    ],
)
def test_a_wrong_relay_is_refused(relay: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HoldfastError, match=complaint):
        make_federation(describe(GECL) | {"relay": relay}, "test")
