"""For those who operate a member: exit codes, JSON logs, health, figures by peer, files for deployment."""

from __future__ import annotations

import configparser
import json
import logging
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import holdfast
from federation_runs import (
    PATIENCE,
    DeployedRun,
    Started,
    deploy,
    describe,
    free_ports,
    member_process,
    write_federation,
)
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.errors import DAMAGED, MISCONFIGURED, REFUSED, TRY_LATER, HoldfastError
from holdfast_deploy.cli.hosting import monitor_page
from holdfast_deploy.consent import ConsentError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.status import blank_status
from holdfast_deploy.ops.audit import AuditError
from holdfast_deploy.ops.events import Events, json_lines, nothing_but_entries
from holdfast_deploy.ops.monitor import MOST_READERS, health, serve_monitor
from holdfast_deploy.storage.disk_full import NoRoomError
from holdfast_deploy.storage.messages import BeyondRepairError, DamagedError
from holdfast_deploy.wire.retry import RefusedForGoodError, WaitLimitError

GECL = {"name": "local-gecl", "lr": 0.1}
DEPLOYMENT = Path(__file__).parents[2] / "examples" / "containers"


def test_every_kind_of_end_has_its_own_code() -> None:
    codes = {
        MISCONFIGURED: [HoldfastError],
        TRY_LATER: [WaitLimitError, NoRoomError],
        REFUSED: [RefusedForGoodError, ConsentError],
        DAMAGED: [DamagedError, BeyondRepairError, AuditError],
    }
    assert len({0, 130, *codes}) == 6
    for code, errors in codes.items():
        assert {error.exit_code for error in errors} == {code}


@pytest.mark.slow
def test_a_log_of_json_lines_holds_nothing_else_and_the_code_tells_why_it_ended(tmp_path: Path) -> None:
    """One process that waits in vain, one whose files are damaged, one that is misconfigured; all at once."""
    raw = describe(GECL, nodes=2, limits={"wait": 1.0, "exchange": 0.5})
    path = write_federation(raw, tmp_path)
    (tmp_path / "node-broken").mkdir()
    (tmp_path / "node-broken" / "identity.json").write_text("{")
    ends = {
        "later": member_process(path, "a"),
        "damaged": member_process(path, "b", "--dir", tmp_path / "node-broken", "--listen", "127.0.0.1:0"),
        "wrong": member_process(path, "b", "--device", "cuda:99", "--dir", tmp_path / "other"),
    }
    codes, last = {}, {}
    for name, process in ends.items():
        lines = process.communicate(timeout=120)[0].splitlines()
        entries = [json.loads(line) for line in lines]
        codes[name], last[name] = process.returncode, entries[-1]
    assert codes == {"later": TRY_LATER, "damaged": DAMAGED, "wrong": MISCONFIGURED}
    for name, entry in last.items():
        assert (entry["event"], entry["exit_code"]) == ("stopping", codes[name])
    assert "that is the limit (limits.wait)" in last["later"]["reason"]


def test_warnings_and_what_libraries_log_become_entries() -> None:
    entries: list[dict] = []
    with nothing_but_entries(Events("a", entries.append)):
        logging.getLogger("some.library").warning("a line\nand another")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", UserWarning, stacklevel=1)
    assert [entry["by"] for entry in entries] == ["some.library", "py.warnings"]
    assert entries[0]["text"] == "a line\\nand another"


def test_a_crash_of_the_sites_own_code_is_an_entry_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_federation(describe(GECL, nodes=2), tmp_path)
    (tmp_path / "own_rows.py").write_text('def rows():\n    raise KeyError("a\\nb")\n')
    monkeypatch.chdir(tmp_path)
    outcome = holdfast("node", path, "--name", "a", "--data", "own_rows:rows", "--log", "json")
    entries = [json.loads(line) for line in outcome.err.splitlines()]
    assert outcome.code == entries[-1]["exit_code"] == 1
    assert entries[-1]["reason"] == r"KeyError: 'a\nb'"
    assert "own_rows.py" in entries[-1]["traceback"]


def test_figures_that_are_not_finite_are_null_in_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"local_loss": float("inf"), "test_loss": float("nan"), "accuracy": 0.5}
    Events("a", json_lines).log("round done", metrics=figures, norms=[1.0, -float("inf")])
    entry = json.loads(capsys.readouterr().err, parse_constant=pytest.fail)
    assert entry["metrics"] == {"local_loss": None, "test_loss": None, "accuracy": 0.5}
    assert entry["norms"] == [1.0, None]


@pytest.mark.parametrize(
    ("option", "given"),
    [("--listen", each) for each in ("nonsense", ":", "127.0.0.1:", "127.0.0.1:99999", "h:-5", "h:²")]
    + [("--monitor", each) for each in ("99999", "h:²", "²", "h:")],
)
def test_ports_that_there_are_not_are_refused_before_anything_starts(
    option: str, given: str, tmp_path: Path
) -> None:
    outcome = holdfast("node", tmp_path / "none.toml", "--name", "a", "--data", "a.npz", option, given)
    assert outcome.code == MISCONFIGURED
    assert f"Invalid value for '{option}'" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_page_whose_port_is_taken_can_be_tried_later() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(HoldfastError, match="--monitor: cannot serve on") as refused,
    ):
        serve_monitor(dict, taken.getsockname()[1])
    assert refused.value.exit_code == TRY_LATER


def test_readers_that_say_nothing_or_go_away_do_not_use_up_the_page(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast_deploy.ops.monitor.LONGEST_READ", 1.0)
    federation, before = make_federation(describe(GECL, nodes=2), "test"), threading.active_count()
    server = serve_monitor(lambda: {**blank_status(federation, "a"), "phase": "x" * 10_000_000}, 0)
    address = ("127.0.0.1", server.server_address[1])
    silent = [socket.create_connection(address) for _ in range(3 * MOST_READERS)]
    gone = socket.create_connection(address)
    gone.sendall(b"GET / HTTP/1.0\r\n\r\n")
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    gone.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/health", timeout=PATIENCE) as answer:
        assert json.load(answer)["healthy"]
    assert threading.active_count() < before + MOST_READERS + 20
    for connection in silent:  # each is ended, also those for which there was room
        connection.settimeout(PATIENCE)
        assert not connection.recv(1)
        connection.close()
    server.shutdown()
    server.server_close()
    assert not capfd.readouterr().err


def test_health_and_figures_by_peer(tmp_path: Path) -> None:
    run = DeployedRun(make_federation(describe(GECL, nodes=2, limits={"wait": 90.0}), "test"), tmp_path)
    started = Started(run, ["a"])
    member = run.members["a"]
    started.until(lambda: "b" in member.waits)
    server = serve_monitor(member.status, 0)
    where = f"http://127.0.0.1:{server.server_address[1]}"
    answer = json.loads(urllib.request.urlopen(f"{where}/health").read())
    assert answer["healthy"] is True
    member.waits["b"].since -= 60
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{where}/health")
    assert error.value.code == 503
    assert json.loads(error.value.read())["late"]["b"] >= 60
    text = urllib.request.urlopen(f"{where}/metrics").read().decode()
    waiting = next(
        f for f in text_string_to_metric_families(text) if f.name == "holdfast_peer_waiting_seconds"
    )
    assert waiting.samples[0].labels == {"peer": "b"}
    assert waiting.samples[0].value >= 60
    assert "holdfast_certificate_days" in text
    server.shutdown()
    server.server_close()
    started.stop()


@pytest.mark.slow
def test_the_monitor_answers_from_the_start_and_through_all_rosters(tmp_path: Path) -> None:
    """Alone, a is let in by nobody; with b and c it takes part; then c is lost, and another roster begins."""
    raw = describe(GECL, 3, 2000, membership={"remove_after": "2s"}, evaluate_every=2000)
    path = write_federation(raw, tmp_path)
    port = free_ports(1)[0]

    def ask(what: str) -> Any:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}").read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def until(what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with suppress(ConnectionError, urllib.error.URLError):
                if what():
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    members = {"a": member_process(path, "a", "--monitor", port)}
    try:
        until(lambda: "waiting" in json.loads(ask("health"))["phase"])
        assert json.loads(ask("health"))["healthy"]
        assert 'holdfast_peer_waiting_seconds{peer="b"}' in ask("metrics")
        assert "waiting to be let in" in ask("")
        members |= {name: member_process(path, name) for name in "bc"}
        until(lambda: json.loads(ask("health"))["round"] >= 2)
        members["c"].kill()
        until(lambda: (tmp_path / "node-a" / "membership" / "roster-1.json").exists())
        until(lambda: json.loads(ask("health"))["phase"].startswith("computing"))
    finally:
        for process in members.values():
            process.kill()
            process.wait()


def test_a_page_of_somebody_else_cannot_read_along(tmp_path: Path) -> None:
    """Its name may point to this machine (DNS rebinding), but it is not this machine's."""
    run = deploy(describe(GECL, nodes=2, rounds=1), tmp_path)
    a = run.members["a"]
    with monitor_page(a.folder, a.status, a.federation.shared_metrics, 0) as server:
        where = f"http://127.0.0.1:{server.server_address[1]}"
        for path in ("/", "/data", "/health", "/metrics", "/metrics?name[]=x"):
            request = urllib.request.Request(f"{where}{path}", headers={"Host": "evil.example:80"})
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert error.value.code == 403, path
        assert urllib.request.urlopen(f"{where}/metrics").status == 200
        with socket.create_connection(server.server_address[:2]) as slow:
            slow.sendall(b"GET / HT")
            server.RequestHandlerClass.timeout = 0.1  # seconds; for those that come from here on
            with socket.create_connection(server.server_address[:2], timeout=10) as slower:
                slower.sendall(b"GET / HT")
                assert slower.recv(1) == b""


def test_who_is_done_is_healthy(tmp_path: Path) -> None:
    run = deploy(describe(GECL, nodes=2, rounds=1), tmp_path)
    status = run.members["a"].status()
    assert health(status)["healthy"]
    assert status["peers"]["b"]["bytes_received"] > 0


# --- files for deployment ----------------------------------------------------------------------------------


def test_the_dashboard_shows_metrics_that_there_are(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOYMENT / "grafana" / "dashboard.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"holdfast_\w+", target["expr"]))
    run = deploy(describe(GECL, nodes=2, rounds=1), tmp_path)
    server = serve_monitor(run.members["a"].status, 0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/metrics").read().decode()
    server.shutdown()
    server.server_close()
    exported = {sample.name for f in text_string_to_metric_families(text) for sample in f.samples}
    families = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert asked
    assert asked <= exported | families


def test_compose_and_kubernetes_files_are_whole() -> None:
    compose = yaml.safe_load((DEPLOYMENT / "compose.yml").read_text())
    nodes = [service for service in compose["services"].values() if service.get("image") == "holdfast"]
    assert len(nodes) == 3
    assert {"prometheus", "grafana"} <= compose["services"].keys()
    targets = yaml.safe_load((DEPLOYMENT / "prometheus.yml").read_text())["scrape_configs"][0][
        "static_configs"
    ]
    assert {target.partition(":")[0] for target in targets[0]["targets"]} <= compose["services"].keys()
    kinds = {}
    for document in yaml.safe_load_all((DEPLOYMENT / "kubernetes.yml").read_text()):
        kinds[document["kind"]] = document
    assert {"StatefulSet", "Service", "PersistentVolumeClaim"} & kinds.keys() >= {"StatefulSet", "Service"}
    assert kinds["Service"]["spec"]["publishNotReadyAddresses"]  # or who is waited for could not come back
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["livenessProbe"]["tcpSocket"]["port"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_image_is_built_in_two_stages_and_does_not_run_as_root() -> None:
    lines = (DEPLOYMENT / "Dockerfile").read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert lines.index(next(line for line in lines if line.startswith("USER "))) < lines.index(
        next(line for line in lines if line.startswith("ENTRYPOINT"))
    )


def test_the_unit_restarts_only_what_may_succeed_later() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOYMENT / "holdfast-node@.service")
    service = unit["Service"]
    assert service["RestartForceExitStatus"] == str(TRY_LATER)
    assert service["Restart"] == "on-abnormal"
    assert int(service["LimitNOFILE"]) >= 4096
    if (verify := shutil.which("systemd-analyze")) is not None:
        checked = [verify, "verify", str(DEPLOYMENT / "holdfast-node@.service")]
        said = subprocess.run(checked, capture_output=True, text=True, check=False).stderr.splitlines()
        assert [line for line in said if "holdfast is not executable" not in line] == []
