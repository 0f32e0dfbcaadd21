"""The live page without a browser: what is read of runs under way, and what the server lets through."""

from __future__ import annotations

import csv
import http.client
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_line import holdfast
from report_page import Page
from sample_run import accuracies, job, two_algorithms, write_run

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RunRecord, load_record
from holdfast.report.following import Followed, Following
from holdfast.report.live import LiveServer, LiveView, answers, is_local, open_view
from holdfast.report.page_data import rows_data
from holdfast_deploy.views import member_view


def append(run: Path, algorithm: str, seed: int, round: int, accuracy: float) -> None:
    """A row as the runner appends it."""
    with (run / "metrics.csv").open("a", newline="") as file:
        costs = [round * 100, round, round * 10, round, round / 2]
        csv.writer(file).writerow([algorithm, seed, round, accuracy, 1 - accuracy, 0.1, *costs])


def change_summary(run: Path, **changes: object) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["jobs"][0].update(changes)
    summary["status"] = "running" if changes.get("status") == "running" else "complete"
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one job under way, at round 10 of 20."""
    return write_run(tmp_path / "run", [job("a", 0, accuracies(0.1, 0.2), "running")], status="running")


# --- what is new ------------------------------------------------------------------------------------------


def test_everything_at_first_and_then_only_what_is_new(run: Path) -> None:
    following = Following(lambda: [run])
    first = following.news("")
    assert (first["reset"], len(first["rows"])) == (True, 2)
    assert first["rows"] == rows_data([load_record(run)])
    following.refresh()
    nothing = following.news(first["since"])
    assert (nothing["reset"], nothing["rows"], nothing["changed"]) == (False, [], False)
    append(run, "a", 0, 20, 0.5)
    assert following.refresh()
    more = following.news(first["since"])
    assert (more["reset"], more["changed"]) == (False, True)
    assert [(row[0], row[1]) for row in more["rows"]] == [(0, 20)]


@pytest.mark.parametrize("since", ["", "1", "1.2.3.4", "x.y.z", "-1.0.0", "9" * 400, "1.1.1\n"])
def test_whoever_says_nonsense_is_told_everything(run: Path, since: str) -> None:
    news = Following(lambda: [run]).news(since)
    assert (news["reset"], len(news["rows"])) == (True, 2)


def test_a_line_that_is_being_written_is_left_for_later(run: Path) -> None:
    following = Following(lambda: [run])
    since = following.news("")["since"]
    with (run / "metrics.csv").open("a") as file:
        file.write("a,0,20,0.")
    following.refresh()
    assert following.news(since)["rows"] == []
    with (run / "metrics.csv").open("a") as file:
        file.write("7,0.3,0.1,2000,20,200,20,10\n")
    following.refresh()
    assert [row[1] for row in following.news(since)["rows"]] == [20]


def test_a_resumed_run_that_lost_rows_begins_anew(run: Path) -> None:
    following = Following(lambda: [run])
    since = following.news("")["since"]
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:-1]))  # back to a checkpoint at round 0
    append(run, "a", 0, 10, 0.9)
    following.refresh()
    news = following.news(since)
    assert news["reset"]
    assert [row[5] for row in news["rows"]] == [0.1, 0.9]


def test_rows_written_again_but_the_same_do_not_begin_anew(run: Path) -> None:
    following = Following(lambda: [run])
    since = following.news("")["since"]
    text = (run / "metrics.csv").read_bytes()
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").write_bytes(text)  # as at every checkpoint
    append(run, "a", 0, 20, 0.5)
    following.refresh()
    assert (following.news(since)["reset"], len(following.news(since)["rows"])) == (False, 1)


def test_only_the_new_part_of_a_long_file_is_parsed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.report import following as module

    read: list[int] = []
    parse = module.metrics_in
    monkeypatch.setattr(module, "metrics_in", lambda file, text: read.append(len(text)) or parse(file, text))
    with (run / "metrics.csv").open("a") as file:
        file.writelines(f"a,0,{r},0.5,0.5,0.1,1,1,1,1,1\n" for r in range(11, 5000))
    followed = Followed(run)
    append(run, "a", 0, 5000, 0.5)
    followed.refresh()
    assert read[0] > 100_000
    assert read[1] < 300
    assert len(followed.record.rows) == 4992


def test_a_file_that_cannot_be_read_now_is_said_and_read_later(run: Path) -> None:
    following = Following(lambda: [run])
    text = (run / "summary.json").read_text()
    (run / "summary.json").write_text(text[:20])
    following.refresh()
    assert "summary.json is damaged" in following.trouble
    assert len(following.shown[0].rows) == 2
    (run / "summary.json").write_text(text)
    following.refresh()
    assert following.trouble == ""


def test_progress_and_log(run: Path) -> None:
    following = Following(lambda: [run])
    assert following.progress() | {"age": 0} == {
        "status": "running",
        "done": 10,
        "rounds": 20,
        "text": "a: round 10 of 20",
        "age": 0,
        "title": "sample",
    }
    append(run, "a", 0, 14, 0.3)  # rows come before the summary is written again
    following.refresh()
    assert following.progress()["text"] == "a: round 14 of 20"
    assert following.shown[0].groups[0].note == "unfinished, at round 14"
    change_summary(run, status="diverged", round=15, message="NaN <b>")
    following.refresh()
    assert following.progress()["status"] == "complete"
    assert following.progress()["done"] == 20  # nothing more will come
    assert [text for _, _, text in following.log] == ["a began", "a diverged after 15 rounds, 5.0 s: NaN <b>"]


def test_several_jobs_in_words(good_run: RunRecord, troubled_run: RunRecord) -> None:
    following = Following(lambda: [troubled_run.path])
    assert following.progress()["text"] == "local-gecl: round 10 of 20, job 4 of 8"
    assert Following(lambda: [good_run.path]).progress()["text"] == "4 jobs, 4 done"
    assert Following(list).progress()["text"] == "nothing yet"


# --- pages ------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_escapes_what_files_say(troubled_run: RunRecord) -> None:
    view = open_view([troubled_run.path])
    text = view.page()
    Page(text)
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;gossip" in text
    parts = view.news("")["parts"]
    assert "<b>" not in "".join(parts.values())
    assert "NaN: &lt;smaller&gt; lr" in parts["said"]


def test_a_page_can_begin_with_nothing() -> None:
    view = LiveView(Following(list))
    Page(view.page())
    assert view.news("")["rows"] == []


def test_a_tuning_grows(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text("{}")
    view = open_view([tmp_path])
    first = view.news("")
    assert first["rows"] == []
    two_algorithms(tmp_path / "grid-0")
    second = view.news(first["since"])
    assert (second["reset"], len(second["rows"])) == (True, 12)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="is not a run directory"):
        open_view([tmp_path / "nowhere"])
    assert holdfast("watch", tmp_path / "nowhere").code == 2
    nothing = holdfast("watch", "--runs-dir", tmp_path)
    assert (nothing.code, nothing.err.startswith("error: no run in ")) == (2, True)


def member_record(folder: Path) -> Path:
    """What a deployed member keeps."""
    folder.mkdir()
    entry = {"algorithm": "gossip", "seed": 0, "axes": {}, "status": "running", "round": 3, "rounds": 9}
    summary = {
        "name": "banks",
        "member": "<i>Ann",
        "status": "running",
        "facts": {},
        "jobs": [entry | {"seconds": 1.0}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.csv").write_text(
        "algorithm,seed,round,local_loss,test_loss,wire_bytes_sent,wire_bytes_received,waiting_seconds,"
        "payload_bytes,payload_bytes_per_link,gradient_evaluations,sample_gradients,seconds\n"
        "gossip,0,3,0.5,0.25,2048,1024,7.5,1536,768,3,96,9.0\n"
    )
    return folder


def test_a_member_of_a_federation(tmp_path: Path) -> None:
    view = open_view([member_record(tmp_path / "node-Ann")])
    text = view.page()
    assert "<i>" not in text
    head, line = Page(text).tables[0]
    assert dict(zip(head, line, strict=True)) == {
        "member": "<i>Ann",
        "round": "3/9",
        "behind": "0",
        "doing": "running",
        "traffic": "1.50 KiB",
        "sent": "2.00 KiB",
        "received": "1.00 KiB",
        "waiting": "7.5 s",
        "last warning": "",
    }


def test_a_monitor_shows_only_what_is_shared(tmp_path: Path) -> None:
    status = {"name": "Ann", "phase": "waiting for <b>", "round": 3, "rounds": 9, "clients": None}
    view = member_view(member_record(tmp_path / "node-Ann"), lambda: status, ["local_loss"])
    text = view.page()
    assert "waiting for &lt;b&gt;" in text
    assert "local_loss" in text
    assert "test_loss" not in text


# --- the server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    served = LiveServer(open_view([two_algorithms(tmp_path_factory.mktemp("served") / "run")]))
    yield served
    served.close(patience=0)


def asked(
    server: LiveServer, path: str, host: str | None = None, method: str = "GET"
) -> http.client.HTTPResponse:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port or 0, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", address.netloc if host is None else host)
    connection.endheaders()
    return connection.getresponse()


def test_the_page_and_its_data(server: LiveServer) -> None:
    path = urlsplit(server.url).path
    page = asked(server, path)
    assert page.status == 200
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Access-Control-Allow-Origin"] is None
    Page(page.read().decode())
    news = json.loads(asked(server, f"{path}data?since=").read())
    assert len(news["rows"]) == 12
    again = json.loads(asked(server, f"{path}data?since={news['since']}").read())
    assert (again["rows"], again["parts"], again["about"]) == ([], {}, {})


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:80", True),
        ("localhost:9999", True),
        ("LOCALHOST", True),
        ("[::1]:80", True),
        ("evil.example", False),
        ("evil.example:80", False),
        ("127.0.0.1.evil.example:80", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_only_names_of_this_machine_are_answered(server: LiveServer, host: str, local: bool) -> None:
    assert is_local(host) == local
    assert asked(server, urlsplit(server.url).path, host).status == (200 if local else 403)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/data",
            "/data?since=",
            "{root}metrics.csv",
            "{root}../",
            "{root}%2e%2e/summary.json",
            "/%00",
        ),
        *("/\xff", "{root}data/../../etc/passwd", "{root}{root}", "//etc/passwd", "/wrong-token-0000000000/"),
    ],
)
def test_nothing_else_is_there(server: LiveServer, path: str) -> None:
    root = urlsplit(server.url).path
    with socket.create_connection(server.server.server_address[:2], timeout=10) as connection:  # as it stands
        request = f"GET {path.format(root=root)} HTTP/1.0\r\nHost: localhost\r\n\r\n"
        connection.sendall(request.encode("latin-1"))
        assert connection.recv(100).split()[1] == b"404"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_is_read_only(server: LiveServer, method: str) -> None:
    assert asked(server, urlsplit(server.url).path, method=method).status == 501


def test_it_listens_on_this_machine_alone(server: LiveServer) -> None:
    assert server.server.server_address[0] == "127.0.0.1"
    port = server.server.server_address[1]
    with pytest.raises(HoldfastError, match=f"--port {port}: cannot serve on 127.0.0.1"):
        LiveServer(LiveView(Following(list)), port)
    other = LiveServer(LiveView(Following(list)))
    assert urlsplit(other.url).path != urlsplit(server.url).path
    assert len(urlsplit(other.url).path) >= 22
    other.close(patience=0)


def test_answers_know_no_files(good_run: RunRecord) -> None:
    assert list(answers(open_view([good_run.path]), "/x/")) == ["/x/", "/x/data"]


def test_watching_needs_neither_torch_nor_matplotlib(good_run: RunRecord) -> None:
    code = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from holdfast.cli.watch import live_page; from holdfast.report.live import open_view\n"
        "with live_page([Path(sys.argv[1])], Console(quiet=True)):\n"
        "    open_view([Path(sys.argv[1])]).page()\n"
        "assert not {'torch', 'matplotlib', 'networkx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(good_run.path)], check=True)


def test_a_thousand_nodes_and_thousands_of_rows(tmp_path: Path) -> None:
    rows = [{"round": r, "test_accuracy": 0.5, "train_loss": 1.0, "consensus": 0.1} for r in range(3000)]
    partition = "node,samples,cat\n" + "".join(f"{i},4,4\n" for i in range(1000))
    network = "i,j,weight\n" + "".join(f"{i},{i + 1},0.5\n" for i in range(999))
    folder = write_run(tmp_path / "run", [job("a", 0, rows, "running")], partition=partition, network=network)
    view = open_view([folder])
    assert len(view.page()) < 600_000
    first = view.news("")
    append(folder, "a", 0, 3000, 0.6)
    assert len(json.dumps(view.news(first["since"]))) < 10_000
    shutil.rmtree(folder)
    view.news(first["since"])  # a run that is gone is said, not an error
    assert "summary.json" in view.news(first["since"])["parts"].get("said", view.following.trouble)
