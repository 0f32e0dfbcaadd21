"""What others must not get: another member's certificate, or our files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import holdfast
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from federation_runs import PATIENCE, describe, forked_member, write_federation

from holdfast_deploy.wire.authority import make_request
from holdfast_deploy.wire.credentials import load_credentials

GECL = {"name": "local-gecl", "lr": 0.1}
LINE = {"topology": "line"}
SERVER = {"topology": "server"}

# --- certificates ------------------------------------------------------------------------------------------


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """A federation file of alpha and beta, and alpha's certificate; the authority's folder."""
    raw = describe(GECL, nodes=2, network=LINE)
    raw["node"][0]["name"], raw["node"][1]["name"] = "alpha", "beta"
    write_federation(raw, tmp_path)
    for path in (tmp_path / "certs").glob("beta.*"):
        path.unlink()
    return tmp_path


def request_for(name: str, office: Path, file: str) -> Path:
    """Somebody's own key and a request for ``name``, as the office receives it in ``file``."""
    request = make_request(office / f"home of {file}", name)
    return request.rename(office / file)


def test_a_request_cannot_take_another_members_name(office: Path) -> None:
    path, alpha = office / "federation.toml", office / "certs" / "alpha.crt"
    before = alpha.read_bytes()
    result = holdfast("federation", "sign", path, request_for("alpha", office, "beta.csr"))
    assert result.code == 2
    assert "asks for the name 'alpha', not 'beta': whoever sent it would become alpha" in result.err
    assert alpha.read_bytes() == before
    alpha.unlink()  # nor before alpha has one
    assert holdfast("federation", "sign", path, office / "beta.csr", "--replace").code == 2
    assert not alpha.exists()


def test_a_certificate_is_replaced_only_on_demand(office: Path) -> None:
    path, alpha = office / "federation.toml", office / "certs" / "alpha.crt"
    before = alpha.read_bytes()
    request, beta = request_for("alpha", office, "new.csr"), request_for("beta", office, "beta.csr")
    result = holdfast("federation", "sign", path, beta, request)
    assert result.code == 2
    assert "alpha.crt is there with another key" in result.err
    assert alpha.read_bytes() == before
    assert not (office / "certs" / "beta.crt").exists()  # none is signed unless all can be
    result = holdfast("federation", "sign", path, beta, request, "--replace")
    assert result.code == 0, result.err
    assert alpha.read_bytes() != before
    assert (office / "certs" / "beta.crt").exists()


def test_the_same_key_is_renewed_without_further_ado(office: Path) -> None:
    path, alpha = office / "federation.toml", office / "certs" / "alpha.crt"
    before = alpha.read_bytes()
    asked = holdfast("federation", "csr", path, "--name", "alpha")
    signed = holdfast("federation", "sign", path, office / "certs" / "alpha.csr")
    assert (asked.code, signed.code) == (0, 0), signed.err
    assert alpha.read_bytes() != before
    load_credentials(office / "certs", "alpha")
    shown = asked.out.split()[-1]  # the fingerprint that alpha's people read out
    assert shown.count(":") == 15
    assert f"asks for the name alpha with the key {shown}" in signed.out


def test_making_all_keys_spares_certificates_of_others_own_keys(office: Path) -> None:
    path = office / "federation.toml"
    beta = request_for("beta", office, "beta.csr")
    assert holdfast("federation", "sign", path, beta).code == 0
    before = (office / "certs" / "beta.crt").read_bytes()
    result = holdfast("federation", "certs", path)
    assert result.code == 2
    assert "beta.crt is there without its key" in result.err
    assert (office / "certs" / "beta.crt").read_bytes() == before
    assert not (office / "certs" / "beta.key").exists()


def test_a_request_that_cannot_be_read_is_one_line(office: Path) -> None:
    good = request_for("beta", office, "beta.csr")
    der = bytearray(x509.load_pem_x509_csr(good.read_bytes()).public_bytes(Encoding.DER))
    at = der.index(bytes.fromhex("2a8648ce3d030107"))  # the curve P-256
    der[at : at + 8] = bytes.fromhex("2a8648ce3d030177")  # one that nobody knows
    good.write_bytes(x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM))
    result = holdfast("federation", "sign", office / "federation.toml", good)
    assert result.code == 2
    assert "is not a certificate request" in result.err


# --- files -------------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def others_may_read(folder: Path) -> list[str]:
    """What in ``folder``, itself included, anybody but the owner may use in any way."""
    return [
        f"{path} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]


@pytest.mark.parametrize("network", [LINE, SERVER])
def test_a_members_files_are_its_own(network: dict[str, Any], tmp_path: Path) -> None:
    algorithm = GECL if network is LINE else {"name": "fedavg", "lr": 0.1}
    raw = describe(algorithm, nodes=2, rounds=2, network=network)
    path = write_federation(raw, tmp_path)
    folders = {"a": "node-a", "b": "node-b"} | ({"hub": "server-hub"} if network is SERVER else {})
    processes = [forked_member(path, name) for name in folders]
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    for folder in folders.values():
        assert others_may_read(tmp_path / folder) == []
        written = {p.name for p in (tmp_path / folder).iterdir()}
        assert {"state", "outbox", "inbox", "decisions", "model.safetensors", "report.json"} <= written
        assert stat.S_IMODE((tmp_path / folder / "state").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / folder / "outbox").stat().st_mode) == 0o700


def test_keys_and_their_folder_are_the_owners(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2, network=LINE), tmp_path)
    home, office = tmp_path / "home", tmp_path / "office"
    with umask(0):
        assert holdfast("federation", "csr", path, "--name", "a", "--certs", home).code == 0
        assert holdfast("federation", "sign", path, home / "a.csr", "--certs", office).code == 0
        assert os.umask(0) == 0  # the process has its own back
    assert others_may_read(home) == others_may_read(office) == []


@pytest.mark.slow
def test_a_rehearsal_with_an_own_model_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(6, 3)\n"
    (tmp_path / "rehearsed_nets.py").write_text(source)
    path = write_federation(describe(GECL, nodes=2, rounds=1, network=LINE), tmp_path)
    with umask(0):
        result = holdfast("federation", "try", path, "--model", "rehearsed_nets:Net", "--data", "a.npz")
    assert result.code == 0, result.err
    assert others_may_read(tmp_path / "rehearsal") == []
    files = {p.relative_to(tmp_path / "rehearsal").as_posix() for p in (tmp_path / "rehearsal").rglob("*")}
    assert {"a.npz", "certs/ca.key", "a.log", "node-a/state", "node-a/metrics.csv"} <= files
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    assert sha256 in result.out
    entries = [json.loads(line) for line in (tmp_path / "rehearsal" / "b.log").read_text().splitlines()]
    shown = next(entry for entry in entries if entry["event"] == "own model")
    assert (shown["model"], shown["sha256"]) == ("rehearsed_nets:Net", sha256)
    assert shown["file"] == str(tmp_path / "rehearsed_nets.py")


def test_a_rehearsal_never_deletes_the_folder_of_the_federation_file(tmp_path: Path) -> None:
    path = write_federation(describe(GECL, nodes=2, network=LINE), tmp_path)
    result = holdfast("federation", "try", path, "--dir", tmp_path, "--fresh")
    assert result.code == 2
    assert "a rehearsal needs a folder of its own" in result.err
    assert path.exists()
    assert np.load(tmp_path / "a.npz")["x_train"].any()
