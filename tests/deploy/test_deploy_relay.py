"""Nodes that only dial out: through a relay that cannot read, the model is, bit for bit, the direct run's."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from federation_runs import DeployedRun, Started, calm_run, describe
from relay_runs import relayed, relaying

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.relay.parcels import RELAY_SERVICE, CardAsk
from holdfast_deploy.relay.relay import Relay

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
        assert relay.parcels > 0
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


class EvilRelay(Relay):
    """Repeats, reorders, changes and reflects parcels, all drawn from a seed."""

    draw, tricks = random.Random(0), 0

    async def send(self, frames: AsyncIterator[bytes], context: Any) -> bytes:
        return await super().send(self.spoiled(frames), context)

    async def spoiled(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(aiter(frames))  # the address
        seen: list[bytes] = []
        async for frame in frames:
            seen.append(frame)
            trick = self.draw.randrange(16)
            self.tricks += trick < 4
            if trick == 0:  # an old one again
                yield self.draw.choice(seen)
            elif trick == 1:  # changed, and lost
                at = self.draw.randrange(len(frame))
                yield frame[:at] + bytes([frame[at] ^ 1 << self.draw.randrange(8)]) + frame[at + 1 :]
                continue
            elif trick == 2:  # an answer as a question, and a question as an answer
                yield bytes([frame[0] ^ 1]) + frame[1:]
            elif trick == 3:  # the last one first
                yield bytes([frame[0] | 2]) + frame[1:]
            yield frame


def test_an_evil_relay_can_delay_but_not_deceive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_deploy.wire.links.SILENCE", 1.0)  # what it lost is soon asked again
    monkeypatch.setattr("holdfast_deploy.wire.service.PATIENCE", 0.5)
    direct = describe(GECL, rounds=6)
    calm = calm_run(direct)
    run = DeployedRun(make_federation(relayed(direct, "abc"), "test"), tmp_path)
    with relaying(run, EvilRelay) as relay:
        run.carry_out()
        assert isinstance(relay, EvilRelay)
        assert relay.tricks > 10
    assert not run.errors
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())
    assert any(entry["event"] == "a parcel was refused" for entry in run.log)


def test_strangers_cannot_use_the_relay(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(relayed(describe(GECL), "abc"), "test"), tmp_path)
    other = DeployedRun(run.federation, tmp_path / "other").credentials("a")
    own = run.credentials("relay")  # of the federation's authority, but no member's
    address = run.federation.relay.address
    options = [("grpc.ssl_target_name_override", "relay"), ("grpc.use_local_subchannel_pool", 1)]
    ask = CardAsk(of="a", scope=run.federation.id).model_dump_json().encode()
    with relaying(run):
        for credentials, code in ((other, "UNAVAILABLE"), (own, "PERMISSION_DENIED")):
            channel_credentials = grpc.ssl_channel_credentials(
                own.authority, credentials.key, credentials.certificate
            )
            with grpc.secure_channel(address, channel_credentials, options=options) as channel:
                for method in ("Card", "Send", "Receive"):
                    with pytest.raises(grpc.RpcError) as refused:
                        list(channel.stream_stream(f"/{RELAY_SERVICE}/{method}")(iter([ask]), timeout=20))
                    assert refused.value.code().name == code


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
