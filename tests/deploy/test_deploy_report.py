"""What deployed members leave behind is what ``holdfast report`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from federation_runs import DeployedRun, deploy, describe, stopped

from holdfast.cli.run import report
from holdfast.experiments.record import load_record, overlaid
from holdfast.report.verdict import troubles
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.wire.retry import WaitLimitError

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}


def test_three_nodes_end_in_one_report_and_in_one_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deploy(describe(GECL, rounds=4, evaluate_every=2), tmp_path)
    folders = [tmp_path / name for name in "abc"]
    report(folders[:1], None)
    alone = (tmp_path / "a" / "report.html").read_text()
    assert "local-gecl" in alone
    assert "As a sees it" in alone
    assert "holdfast run" not in alone  # it would need everybody's data
    assert (tmp_path / "a" / "plots" / "local_loss.svg").exists()
    report(folders, tmp_path / "all.html")
    together = (tmp_path / "all.html").read_text()
    for name in "abc":
        assert f"{name}: local-gecl" in together
    assert "warning" not in capsys.readouterr().err
    for record, name in zip(overlaid([load_record(folder) for folder in folders]), "abc", strict=True):
        row = record.final_table()[0]
        assert (row.status, row.round, row.label) == ("done", 4, f"{name}: local-gecl")
        assert [curve.x for curve in record.series("test_accuracy")] == [[0, 2, 4]]
        assert row.values["payload_bytes"].mean == run.members[name].accounts.payload_bytes
        assert row.values["gradient_evaluations"].mean == 4 * 2
        assert troubles(record) == []


def test_a_server_and_its_clients_have_records_too(tmp_path: Path) -> None:
    scaffold = {"name": "scaffold", "lr": 0.1, "local_steps": 2}
    run = deploy(describe(scaffold, rounds=3, network={"topology": "server"}), tmp_path)
    report([tmp_path / name for name in ("a", "hub")], tmp_path / "all.html")
    client, server = load_record(tmp_path / "a"), load_record(tmp_path / "hub")
    assert client.final_table()[0].round == server.final_table()[0].round == 3
    assert server.series("wire_bytes_received")[0].x == [0, 1, 2, 3]
    assert server.final_table()[0].values["payload_bytes"].mean == run.members["hub"].accounts.payload_bytes


def test_a_member_that_was_stopped_says_so_and_its_record_goes_on(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=12)
    run = stopped(raw, tmp_path, at=3)
    record = load_record(tmp_path / "a")
    row = record.final_table()[0]
    assert row.status == "interrupted"
    assert row.round is not None
    assert "the same command at a" in troubles(record)[0]
    again = DeployedRun(run.federation, tmp_path).carry_out()
    assert not again.errors
    curve = load_record(tmp_path / "a").series("local_loss")[0]
    assert curve.x == list(range(13))


def test_a_member_that_failed_says_why(tmp_path: Path) -> None:
    raw = describe(GECL, rounds=200)
    run = stopped(raw, tmp_path, at=1)
    run.federation = make_federation(raw | {"limits": {"wait": 0.3, "exchange": 0.2}}, "test")
    with run.member("a") as alone, pytest.raises(WaitLimitError):
        alone.run()
    entry = json.loads((tmp_path / "a" / "summary.json").read_text())["jobs"][0]
    assert entry["status"] == "failed"
    assert "limits.wait" in entry["message"]
    assert load_record(tmp_path / "a").final_table()[0].status == "failed"
