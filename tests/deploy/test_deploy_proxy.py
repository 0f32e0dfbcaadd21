"""Members behind an HTTP proxy take part, and are as careful there about whom they talk to."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from connect_proxy import ConnectProxy
from federation_runs import DeployedRun, Started, calm_run, describe, free_ports

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.wire.authority import make_certificates, make_request, sign_request
from holdfast_deploy.wire.credentials import Credentials, load_credentials, serial_of
from holdfast_deploy.wire.dial import Unreachable, way_to
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.protocol import STATUS, RefusedError
from holdfast_deploy.wire.proxies import proxy_to
from holdfast_deploy.wire.revocations import Revoked, revoke

GOSSIP = {"name": "gossip", "lr": 0.1}
VARIABLES = ("https_proxy", "http_proxy", "no_proxy")


@pytest.fixture
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy | None]:
    """What all in this process go through; None: nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if request.param == "direct":
        yield None
        return
    made, (port,) = ConnectProxy(), free_ports(1)
    made.open(port)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    yield made
    made.close()


class Apart(DeployedRun):
    """Every member has its own folder of certificates."""

    def credentials(self, name: str) -> Credentials:
        return load_credentials(self.folder / f"certs-{name}", name, self.federation.coordinator)


def revoked_peer(folder: Path) -> tuple[Apart, Apart]:
    """Runs for a, who knows that b's certificate is revoked, and for b, who does not and never reaches a."""
    certs = folder / "certs"
    raw = describe(GOSSIP, nodes=2, coordinator=public_key(make_key(certs)))
    make_certificates(certs, "test", ["a", "b"], days=1)
    for name in "ab":
        shutil.copytree(certs, folder / f"certs-{name}")
    entry = Revoked(name="b", serial=serial_of((certs / "b.crt").read_bytes()), time="today")
    revoke(folder / "certs-a", entry, raw["coordinator"])
    nowhere = [{"name": "a", "address": f"127.0.0.1:{free_ports(1)[0]}"}, raw["node"][1]]
    ours, theirs = make_federation(raw, "test"), make_federation(raw | {"node": nowhere}, "test")
    return Apart(ours, folder), Apart(theirs, folder)


@pytest.mark.parametrize("proxy", ["direct", "proxy"], indirect=True)
def test_nothing_is_fetched_from_a_member_whose_certificate_is_revoked(
    proxy: ConnectProxy | None, tmp_path: Path
) -> None:
    ours, theirs = revoked_peer(tmp_path)
    b, a = Started(theirs, ["b"]), Started(ours, ["a"])
    member, peer = ours.members["a"], theirs.members["b"]
    links = member.connections

    def refused() -> bool:
        return "was revoked on today" in str(links.waits.get("b"))

    def talked() -> bool:
        assert peer.credentials is not None
        link = links.links.get("b")
        heard = peer.credentials.revocations.number > 0
        return heard or member.done > 0 or (link is not None and link.bytes_received > 0)

    try:
        a.until(lambda: refused() or talked())
        assert refused()
        assert not talked()
        assert proxy is None or f"CONNECT {ours.federation.member('b').address}" in proxy.requests
    finally:
        for started in (a, b):
            for running in started.run.members.values():
                running.stop()
            started.end()


@pytest.mark.parametrize("proxy", ["proxy"], indirect=True)
def test_a_proxy_gains_nothing_by_showing_two_certificates(proxy: ConnectProxy, tmp_path: Path) -> None:
    """We talk to b, with its new certificate; then the proxy connects us to a thief with the old one."""
    ours, thief = revoked_peer(tmp_path)
    federation, place = ours.federation, ours.federation.member("b").address
    new_folder = tmp_path / "new" / "certs-b"
    shutil.copytree(tmp_path / "certs", new_folder)
    sign_request(new_folder, make_request(new_folder, "b"), ["b"], 1)
    (behind,) = free_ports(1)
    a = load_credentials(tmp_path / "certs-a", "a", federation.coordinator)

    async def ask() -> list[str]:
        """What becomes of three questions; after the first, the connections end and go to the thief."""
        line, became = Line(way_to(federation, "a", "b"), a), list[str]()
        for _ in range(3):
            try:
                await line.ask(STATUS, headers={})
                became.append("answered")
            except (Unreachable, RefusedError) as error:
                became.append(str(error))
            assert line.shown in (b"", new)
            proxy.elsewhere[int(place.rpartition(":")[2])] = behind
            line._abort()
        await line.close()
        return became

    new = (new_folder / "b.crt").read_bytes()
    with thief.member("b", listen=f"127.0.0.1:{behind}"), Apart(federation, tmp_path / "new").member("b"):
        first, *others = asyncio.run(ask())
    assert first == "answered"
    assert all("was revoked on today" in reason for reason in others)


@pytest.mark.parametrize("proxy", ["proxy"], indirect=True)
def test_members_who_dial_one_another_through_a_proxy_take_part(
    proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants to know a user and a password."""
    monkeypatch.setenv(
        "https_proxy", os.environ["https_proxy"].replace("http://", "http://user:pass%2Fword@")
    )
    proxy.demand = base64.b64encode(b"user:pass/word").decode()
    raw = describe(GOSSIP, rounds=3)
    run = DeployedRun(make_federation(raw, "test"), tmp_path).carry_out()
    assert not run.errors
    assert set(proxy.requests) == {f"CONNECT {member.address}" for member in run.federation.members}
    calm = calm_run(raw)
    assert all(torch.equal(run.models[name], model) for name, model in calm.models.items())


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://p:1"}, None),
        ({"https_proxy": "http://p:1", "http_proxy": "http://q:1"}, "p"),
        ({"http_proxy": "http://u:w@q:1"}, "q"),
        ({"https_proxy": "socks5://p:1"}, None),
        ({"https_proxy": "http://p:1", "no_proxy": "x.org, .Example.org"}, None),
        ({"https_proxy": "http://p:1", "no_proxy": "x.org"}, "p"),
    ],
)
def test_the_proxy_is_the_one_in_the_environment(environment: dict[str, str], found: str | None) -> None:
    proxy = proxy_to("b.example.org", environment)
    assert (proxy.host if proxy else None) == found


def test_a_proxy_that_makes_no_sense_is_named() -> None:
    with pytest.raises(HoldfastError, match="https_proxy names no proxy: expected http://HOST:PORT"):
        proxy_to("b.example.org", {"https_proxy": "http://u:secret@p:port"})


def test_networks_may_be_spared_too() -> None:
    environment = {"https_proxy": "http://p:1", "no_proxy": "10.1.0.0/16"}
    assert proxy_to("10.1.2.3", environment) is None
    assert proxy_to("10.2.2.3", environment) is not None
