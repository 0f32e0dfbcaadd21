"""The federation file, certificates and the commands around them."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import tomli_w
import torch
from command_line import holdfast
from federation_runs import (
    CLASSES,
    PATIENCE,
    SHAPE,
    DeployedRun,
    describe,
    free_ports,
    make_data,
    write_federation,
)
from http_peers import Caller

from holdfast.core.errors import MISCONFIGURED, HoldfastError
from holdfast_deploy.cli.hosting import monitor_page
from holdfast_deploy.federation_file import make_federation, read_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.ops.monitor import serve_monitor
from holdfast_deploy.site import open_site
from holdfast_deploy.storage.store import message_key, message_name
from holdfast_deploy.wire.authority import (
    make_authority,
    make_certificates,
    make_request,
    sign_request,
)
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.protocol import LINKS

GECL = {"name": "local-gecl", "lr": 0.1}
SERVER = {"topology": "server"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rouds": 3}, "unknown key in the federation file 'rouds': did you mean 'rounds'?"),
        ({"problem": {"modle": "mlp"}}, "unknown key in [problem] 'modle': did you mean 'model'?"),
        ({"rounds": 0}, "rounds: should be greater than or equal to 1, got 0"),
        ({"algorithm": {"name": "local-gcl"}}, "unknown algorithm 'local-gcl': did you mean 'local-gecl'?"),
        ({"network": {"topology": "rign"}}, "unknown topology 'rign': did you mean 'ring'?"),
        ({"network": SERVER, "server": None}, "needs a [server]"),
        ({"server": {"name": "hub", "address": "h:1"}}, "leave [server] out"),
        ({"algorithm": {"name": "fedavg", "lr": 0.1, "curvature": "estimate"}}, "give mu and L yourself"),
        ({"problem": {"weights": "samples"}}, "say how many samples 'a' has"),
        (
            {"limits": {"wait": 2.0, "exchange": 2.0}, "network": {"links": 0.5}},
            "limits.exchange: should be less than limits.wait",
        ),
        ({"node": [{"name": "a", "address": "h:1"}] * 2}, "'a' is taken twice"),
        ({"node": [{"name": "A b", "address": "h:1"}]}, "node.0.name"),
        ({"node": [{"name": "a", "address": "h:65536"}]}, "ports go up to 65535"),
        ({"node": [{"name": "ca", "address": "h:1"}]}, "'ca' belongs to the authority's files"),
        (
            {"problem": {"model": {"name": "os:system", "command": "id"}}},
            "names code, which a federation file",
        ),
        ({"problem": {"model": "nets:Net"}}, "on the command line of every site: --model module:Class"),
        ({"problem": {"loss": "os:system"}}, "unknown loss 'os:system'"),
        ({"algorithm": {"name": "os:system", "command": "id"}}, "unknown algorithm 'os:system'"),
        ({"network": {"topology": {"name": "os:system"}}}, "unknown topology 'os:system'"),
        ({"network": {"mixing": "os:system"}}, "unknown mixing"),
        ({"network": {"topology": {"name": "edge-list", "path": "/etc/hosts"}}}, "leads to another folder"),
        ({"network": {"topology": {"name": "edge-list", "path": "../graph"}}}, "leads to another folder"),
        ({"algorithm": {"name": "local-gecl", "lr": 0.1, "\x1b[2J": 1}}, "unknown key in algorithm"),
        ({"\x1b[2J": 1}, r"'\x1b[2J'"),
        ({"node": [{"name": "a"}, {"name": "b", "address": "h:1"}]}, "a: others have to reach it"),
        ({"membership": {"remove_after": 0.2}}, "remove_after: should be greater than or equal to 1"),
        ({"algorithm": {"name": "x" * 100_000}}, f"unknown algorithm '{'x' * 96}...: choose from"),
    ],
)
def test_mistakes_in_the_file_are_one_line_that_helps(changes: dict, complaint: str) -> None:
    raw = describe(GECL) | {}
    for key, value in changes.items():
        if value is None:
            raw.pop(key, None)
        elif isinstance(value, dict) and key != "algorithm" and key in raw:
            raw[key] = raw[key] | value
        else:
            raw[key] = value
    with pytest.raises(HoldfastError) as error:
        make_federation(raw, "federation.toml")
    assert complaint in str(error.value)
    assert str(error.value).startswith("federation.toml: ")
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_and_other_line_ends_make_no_difference(tmp_path: Path) -> None:
    text = tomli_w.dumps(describe(GECL))
    for name, content in {"plain": text, "marked": "\ufeff" + text.replace("\n", "\r\n")}.items():
        (tmp_path / name).write_bytes(content.encode())
    assert read_federation(tmp_path / "plain").id == read_federation(tmp_path / "marked").id


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t * torch.nan, "'1.bias' has numbers that are not finite"),
        (lambda t: t.to(torch.int32), "'1.bias' is of type torch.int32"),
        (lambda t: t.to(torch.complex64), "'1.bias' is of type torch.complex64"),
        (lambda t: t[:1], "does not fit the model: size mismatch"),
    ],
)
def test_a_federation_does_not_start_from_numbers_that_are_no_model(
    change: Callable[[torch.Tensor], torch.Tensor],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = {"1.bias": torch.zeros(CLASSES), "1.weight": torch.zeros(CLASSES, SHAPE)}
    safetensors.torch.save_file(tensors, "start.safetensors")
    federation = make_federation(describe(GECL) | {"start": "start.safetensors"}, "")
    federation.module()
    changed = {name: change(tensor).contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed, "start.safetensors")
    with pytest.raises(HoldfastError, match=complaint):
        federation.module()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["certs", "--days", "nan"], "expected more than 0 and at most 3650 days"),
        (["certs", "--days", "1e308"], "expected more than 0 and at most 3650 days"),
        (["sign", "--days", "0"], "expected more than 0 and at most 3650 days"),
        (["revoke", "a", "--serial", "zz"], "--serial: should match pattern"),
        (["revoke", "a", "--serial", "1", "--reason", "x" * 300], "--reason: should have at most 200"),
    ],
)
def test_mistakes_about_certificates_are_one_line(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(describe(GECL) | {"coordinator": "0" * 64}))
    outcome = holdfast("federation", arguments[0], path, *arguments[1:])
    assert outcome.code == MISCONFIGURED
    assert complaint in " ".join(outcome.err.replace("│", " ").split())
    assert not (tmp_path / "certs").exists()


def test_the_id_covers_what_members_must_agree_on_and_nothing_else() -> None:
    raw = describe(GECL)
    known = make_federation(raw, "").id
    elsewhere = [{**node, "address": "host:1"} for node in raw["node"]]
    assert (
        make_federation(raw | {"node": elsewhere, "limits": {"wait": 5.0, "exchange": 1.0}}, "").id == known
    )
    assert make_federation(raw | {"shared_metrics": ["local_loss"]}, "").id != known
    assert make_federation(raw | {"evaluate_every": 2}, "").id != known
    assert make_federation(raw | {"coordinator": "0" * 64}, "").id != known
    assert make_federation(raw | {"algorithm": {"name": "local-gecl", "lr": 0.2}}, "").id != known
    assert make_federation(raw | {"seed": 4}, "").id != known
    assert make_federation(raw | {"node": raw["node"][::-1]}, "").id != known


def test_the_id_covers_links_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random graph may come out differently with another version of a library."""
    raw = describe(GECL, nodes=4)
    federation = make_federation(raw, "")
    known = federation.id
    assert b'"links": [[1, 3], [0, 2], [1, 3], [0, 2]]' in federation.agreement
    monkeypatch.setattr("holdfast.__version__", "99.0")
    assert make_federation(raw, "").id != known


def test_data_are_checked_against_the_file() -> None:
    for changes, complaint in (
        ({"input_shape": [7]}, "samples are [6], the federation file says [7]"),
        ({"classes": 2}, "out of range"),
    ):
        federation = make_federation(describe(GECL, problem=changes), "")
        with pytest.raises(HoldfastError) as error:
            open_site(federation, "c", make_data(2))
        assert complaint in str(error.value)
    raw = describe(GECL)
    raw["node"][2]["samples"] = 3
    with pytest.raises(HoldfastError, match="22 samples, the federation file says 3"):
        open_site(make_federation(raw, ""), "c", make_data(2))


# --- certificates ------------------------------------------------------------------------------------------


def test_keys_that_never_leave_home(tmp_path: Path) -> None:
    """csr at the node, sign at the authority, and only public files travel."""
    home, office = tmp_path / "home", tmp_path / "office"
    request = make_request(home, "b")
    make_authority(office, "test")
    certificate = sign_request(office, request, ["a", "b"], days=1)
    (home / "b.crt").write_bytes(certificate.read_bytes())
    (home / "ca.crt").write_bytes((office / "ca.crt").read_bytes())
    assert load_credentials(home, "b").key == (home / "b.key").read_bytes()
    assert sorted(path.name for path in office.iterdir()) == ["b.crt", "ca.crt", "ca.key"]
    for key in (home / "b.key", office / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_nobody_becomes_an_authority_by_mistake(tmp_path: Path) -> None:
    """A member holds ca.crt without its key: signing there would replace what its certificate rests on."""
    (tmp_path / "ca.crt").write_bytes(b"the authority's")
    with pytest.raises(HoldfastError, match="only the holder of the authority's key can sign"):
        make_authority(tmp_path, "test")
    assert (tmp_path / "ca.crt").read_bytes() == b"the authority's"


def test_certificates_that_will_not_do_are_named_before_anything_starts(tmp_path: Path) -> None:
    make_certificates(tmp_path, "test", ["a", "b"], days=1)
    with pytest.raises(HoldfastError, match=r"c\.key cannot be read"):
        load_credentials(tmp_path, "c")
    (tmp_path / "c.key").write_bytes((tmp_path / "a.key").read_bytes())
    (tmp_path / "c.crt").write_bytes((tmp_path / "a.crt").read_bytes())
    with pytest.raises(HoldfastError, match=r"is for \['a'\], not for 'c'"):
        load_credentials(tmp_path, "c")
    with pytest.raises(HoldfastError, match="the federation has b"):
        sign_request(tmp_path, make_request(tmp_path, "a"), ["b"], days=1)
    sign_request(tmp_path, make_request(tmp_path, "a"), ["a"], days=-0.5)
    with pytest.raises(HoldfastError, match=r"is not valid now.*; renew it with"):
        load_credentials(tmp_path, "a")
    make_certificates(tmp_path / "other", "test", ["b"], days=1)
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(HoldfastError, match="not signed by the authority"):
        load_credentials(tmp_path, "b")


def test_nothing_older_than_tls_1_3_is_spoken(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(describe(GECL), ""), tmp_path)
    with run.member("a") as member:
        context = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.crt"))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's own choice from 3.13 on
        context.load_cert_chain(tmp_path / "certs" / "b.crt", tmp_path / "certs" / "b.key")

        def handshake(version: ssl.TLSVersion) -> str | None:
            context.minimum_version = context.maximum_version = version
            with (
                socket.create_connection(("127.0.0.1", member.port)) as plain,
                context.wrap_socket(plain, server_hostname="a") as encrypted,
            ):
                return encrypted.version()

        assert handshake(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises(OSError, match=r"EOF|reset|(?i:protocol.version)"):
            handshake(ssl.TLSVersion.TLSv1_2)


@pytest.mark.parametrize("address", ["192.0.2.1:7000", "127.example:7000", "[2001:db8::1]:7000"])
def test_without_certificates_only_on_loopback(address: str, tmp_path: Path) -> None:
    raw = describe(GECL)
    raw["node"][0]["address"] = address
    path = write_federation(raw, tmp_path)
    result = holdfast("node", path, "--name", "b", "--data", tmp_path / "b.npz", "--insecure")
    assert result.code == 2
    assert "only for loopback addresses" in result.err
    assert address in result.err


# --- commands ----------------------------------------------------------------------------------------------


def test_new_certs_csr_and_sign(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    nodes = "--nodes=a=h1:7001,b=h2:7001,c=h3:7001"
    shape = ("--input-shape", "1,8,8", "--classes", 10)
    result = holdfast(
        "federation", "new", nodes, "--topology", "ring", "--algorithm", "local-gecl", *shape, "-o", path,
        "algorithm.lr=0.1", "problem.model=mlp", "rounds=7",
    )  # fmt: skip
    assert result.code == 0, result.err
    federation = read_federation(path)
    assert (federation.rounds, federation.names) == (7, ["a", "b", "c"])
    assert federation.problem.model.name == "mlp"
    assert federation.member("c").address == "h3:7001"

    assert holdfast("federation", "certs", path).code == 0
    load_credentials(tmp_path / "certs", "c")

    home = tmp_path / "home"
    assert holdfast("federation", "csr", path, "--name", "b", "--certs", home).code == 0
    assert holdfast("federation", "sign", path, home / "b.csr", "--replace").code == 0
    (home / "b.crt").write_bytes((tmp_path / "certs" / "b.crt").read_bytes())
    (home / "ca.crt").write_bytes((tmp_path / "certs" / "ca.crt").read_bytes())
    load_credentials(home, "b")

    again = holdfast("federation", "new", nodes, "--algorithm", "local-gecl", *shape, "-o", path)
    assert (again.code, "exists already" in again.err) == (2, True)
    missing = holdfast("federation", "new", nodes, "--algorithm", "gossip", *shape, "-o", tmp_path / "x.toml")
    assert (missing.code, "'lr' is missing" in missing.err) == (2, True)


def test_status_tells_who_is_up_and_shares_only_what_is_listed(tmp_path: Path) -> None:
    raw = describe(GECL, nodes=2, shared_metrics=["local_loss"])
    path = write_federation(raw, tmp_path)
    run = DeployedRun(read_federation(path), tmp_path)
    network = NetworkThread()
    member = run.member("a", network)
    thread = threading.Thread(target=run._run, args=["a"], daemon=True)
    run.members["a"] = member
    thread.start()
    while not member.waits:  # b is not there
        time.sleep(0.01)
    told = json.loads(holdfast("federation", "status", path, "--json").out)
    assert told["b"] == {"phase": "down"}
    assert told["a"]["round"] == 0
    assert "waiting for b" in told["a"]["phase"]
    assert list(told["a"]["metrics"]) == ["local_loss"]
    table = holdfast("federation", "status", path).out
    assert "down" in table
    assert "0/5" in table

    server = serve_monitor(member.status, 0)
    port = server.server_address[1]
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert "holdfast_round 0.0" in metrics
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/").read().decode()
    assert "waiting for b" in page
    server.shutdown()
    server.server_close()

    shared = member.federation.shared_metrics
    with monitor_page(member.folder, member.status, shared, 0) as server:  # as the command line serves it
        port = server.server_address[1]
        assert (
            "holdfast_round 0.0" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        )
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/").read().decode()
        assert "waiting for b" in page
        news = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/data?since=").read())
        metrics = [metric["name"] for metric in news["about"]["metrics"]]
        assert not {"test_loss", "test_accuracy"} & set(metrics)  # which are not shared
        stranger = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(stranger)
    member.stop()
    thread.join(PATIENCE)
    member.close()
    network.close()


def test_a_non_neighbour_and_a_non_member_are_refused(tmp_path: Path) -> None:
    """On a line a - b - c, c may not have a's messages, and d is nobody."""
    run = DeployedRun(make_federation(describe(GECL, network={"topology": "line"}), ""), tmp_path)
    make_certificates(tmp_path / "certs", "test", ["a", "b", "c", "d"], days=1)
    with run.member("a") as member:
        question = (
            f'{{"federation": "{run.federation.id}", "start": "{member.start}", "round": 0, "exchange": 0}}'
        )
        address = run.federation.member("a").address

        def ask(name: str, text: str) -> int:
            context = load_credentials(tmp_path / "certs", name).client_context("a")
            with Caller(address, "a", context, timeout=0.5) as caller:
                return caller.ask(LINKS, text.encode()).status

        with pytest.raises(TimeoutError):
            ask("b", question)  # nothing to tell yet
        assert ask("c", question) == 403
        assert ask("d", question) == 403
        assert ask("b", "garbage") == 400
        assert ask("b", question.replace(run.federation.id, "x")) == 409
        assert ask("b", question.replace('"round": 0', '"round": 99')) == 400
    reasons = [entry["reason"] for entry in run.log]
    assert "not a neighbour" in reasons
    assert "not a member of the federation" in reasons


@pytest.mark.slow
def test_a_rehearsal_trains_everybody_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    ports = free_ports(2)
    nodes = f"--nodes=a=127.0.0.1:{ports[0]},b=127.0.0.1:{ports[1]}"
    holdfast(
        "federation", "new", nodes, "--algorithm", "local-gecl", "--input-shape", "1,8,8", "--classes", 10,
        "--rounds", 5, "-o", path, "algorithm.lr=0.1",
    )  # fmt: skip
    folder = tmp_path / "rehearsal"
    for _ in range(2):
        result = holdfast("federation", "try", path, "--data", "digits", "--dir", folder)
        assert result.code == 0, result.err
        assert "test accuracy" in result.out
    assert (folder / "node-b" / "model.safetensors").exists()


def test_a_foreign_file_in_a_members_folder_is_named() -> None:
    assert message_key(message_name(3, 1, "hub-2")) == (3, 1, "hub-2")
    with pytest.raises(HoldfastError, match=r"'notes\.txt' is not of this federation"):
        message_key("notes.txt")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rounds": 2**31}, "rounds: should be less than 1073741824"),  # rounds have 31 bits on the wire
        ({"algorithm": {"name": "local-gecl", "lr": 0.1, "local_steps": 10**12}}, "local_steps: at most"),
        (
            {"node": [{"name": n, "address": "h:1", "local_steps": 10**12} for n in "abc"]},
            "local_steps: at most",
        ),
    ],
)
def test_a_file_cannot_ask_for_more_than_anybody_could_do(changes: dict, complaint: str) -> None:
    """'federation show' counts what a round takes, and would count for ever."""
    with pytest.raises(HoldfastError, match=complaint):
        make_federation(describe({"name": "local-gecl", "lr": 0.1, "local_steps": 2}) | changes, "test")


@pytest.mark.parametrize("text", ["a = " + 100_000 * "[", "rounds = " + 5000 * "9"])
def test_a_file_that_no_parser_can_read_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(text)
    with pytest.raises(HoldfastError, match="is not valid TOML"):
        read_federation(path)
