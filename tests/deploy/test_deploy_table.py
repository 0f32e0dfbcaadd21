"""``metrics.csv`` of a member is appended to: what a round costs does not grow, and no crash breaks it."""

from __future__ import annotations

import csv
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation_runs import Started, describe, stopped
from forks import Forked, python

from holdfast.experiments.record import load_record
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.storage.messages import DamagedError
from holdfast_deploy.storage.results import COSTS, Record

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
SPENT = dict.fromkeys(COSTS, 1.5)


def record(folder: Path, rounds: int = 20000) -> Record:
    federation = make_federation(describe(GECL, rounds=rounds), "test")
    return Record(folder, federation, "a", {})


def figures(round: int) -> dict[str, float]:
    return {"train_loss": 1 / (round + 1), "test_loss": 1 / (round + 1), "test_accuracy": round / 1e5}


def grown(folder: Path, rounds: int) -> Record:
    kept = record(folder)
    for round in range(rounds):
        kept.add(round, figures(round), SPENT)
    return kept


def recorded(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["round"]) for row in csv.DictReader(file)]


def traffic(action: Callable[[], None]) -> int:
    """Bytes that this thread reads and writes meanwhile."""

    def so_far() -> int:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return int(found["rchar"]) + int(found["wchar"])

    first = so_far()
    before = so_far()
    action()
    return (so_far() - before) - (before - first)


def steps(action: Callable[[], object]) -> int:
    """Lines of Python that are run meanwhile."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.skipif(not Path("/proc/thread-self/io").exists(), reason="counts bytes as Linux does")
def test_a_round_reads_and_writes_as_much_after_many_rounds_as_after_few(tmp_path: Path) -> None:
    table = grown(tmp_path, 100)
    few = traffic(lambda: table.add(100, figures(100), SPENT))
    for round in range(101, 3000):
        table.add(round, figures(round), SPENT)
    many = traffic(lambda: table.add(3000, figures(3000), SPENT))
    assert 0 < many < 2 * few
    assert many < 1000 < (tmp_path / "metrics.csv").stat().st_size / 100


def test_a_round_takes_as_many_operations_after_many_rounds_as_after_few(tmp_path: Path) -> None:
    table = grown(tmp_path, 10)

    def one(round: int) -> Callable[[], object]:
        return lambda: (table.add(round, figures(round), SPENT), table.is_best())

    few = steps(one(10))
    for round in range(11, 1000):
        table.add(round, figures(round), SPENT)
    assert steps(one(1000)) == few


@pytest.mark.parametrize("gone", [1, 7, 60])
def test_a_torn_line_is_cut_off_at_the_start(gone: int, tmp_path: Path) -> None:
    grown(tmp_path, 5)
    whole = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").write_bytes(whole[:-gone] if gone < 60 else whole + b"\0" * gone)
    again = record(tmp_path)
    again.keep(upto=4)
    left = 4 if gone < 60 else 5
    assert recorded(tmp_path) == list(range(left))
    for round in range(left, 5):
        again.add(round, figures(round), SPENT)
    assert (tmp_path / "metrics.csv").read_bytes() == whole


def test_only_the_heading_was_torn(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("algorithm,se")
    again = record(tmp_path)
    again.keep(upto=-1)
    again.add(0, figures(0), SPENT)
    assert recorded(tmp_path) == [0]


def test_a_member_that_goes_back_has_no_round_twice(tmp_path: Path) -> None:
    """At a start, by its checkpoint; and by doing a round again without one."""
    once = grown(tmp_path, 8)
    whole = (tmp_path / "metrics.csv").read_bytes()
    back = record(tmp_path)
    back.keep(upto=3)
    assert recorded(tmp_path) == [0, 1, 2, 3]
    for table in (back, once):
        for round in range(4, 8):
            table.add(round, figures(round), SPENT)
        assert (tmp_path / "metrics.csv").read_bytes() == whole
    once.add(2, figures(2), SPENT)
    assert recorded(tmp_path) == [0, 1, 2]


def test_a_figure_that_appears_later_has_a_column_and_none_is_lost(tmp_path: Path) -> None:
    table = grown(tmp_path, 3)
    table.add(3, {"train_loss": 0.5, "share": 0.25}, SPENT)
    table.add(4, figures(4), SPENT)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["share"] for row in rows] == ["", "", "", "0.25", ""]
    assert [row["test_loss"] == "" for row in rows] == [False, False, False, True, False]
    assert list(rows[0])[-len(COSTS) :] == list(COSTS)
    table.conclude("running", 4, 1.0)
    assert [row["round"] for row in load_record(tmp_path).rows] == [0, 1, 2, 3, 4]


def test_the_best_round_is_the_best_of_all_also_after_a_start(tmp_path: Path) -> None:
    table, best = record(tmp_path), []
    for round, loss in enumerate([3.0, 2.0, 2.5, 0.0, 1.0]):
        table.add(round, {"test_loss": loss}, SPENT)
        best.append(table.is_best())
    assert best == [True, True, False, True, False]
    again = record(tmp_path)
    again.keep(upto=2)
    for loss, expected in ((2.2, False), (1.0, True)):
        again.add(3, {"test_loss": loss}, SPENT)
        assert again.is_best() == expected


def test_a_line_for_which_there_was_no_room_is_written_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = grown(tmp_path, 3)
    sync = os.fdatasync

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)  # what a full disk leaves of a line
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        table.add(3, figures(3), SPENT)
    monkeypatch.setattr(os, "fdatasync", sync)
    table.add(3, figures(3), SPENT)
    assert recorded(tmp_path) == [0, 1, 2, 3]


def test_a_line_is_synced_before_the_round_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, synced, sync = grown(tmp_path, 3), [], os.fdatasync

    def noting(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", noting)
    table.add(3, figures(3), SPENT)
    assert synced == [(tmp_path / "metrics.csv").stat().st_size]


def test_a_table_that_was_taken_away_begins_anew(tmp_path: Path) -> None:
    table = grown(tmp_path, 3)
    (tmp_path / "metrics.csv").unlink()
    table.add(3, figures(3), SPENT)
    table.add(4, figures(4), SPENT)
    assert recorded(tmp_path) == [3, 4]


def test_damage_is_told_at_the_start_and_costs_no_more_than_the_rows_before(tmp_path: Path) -> None:
    grown(tmp_path, 3)
    (tmp_path / "metrics.csv").write_text("round,x\none,1\n")
    again = record(tmp_path)
    with pytest.raises(DamagedError, match="the rows before round 3 are lost"):
        again.keep(upto=2)
    again.add(3, figures(3), SPENT)
    assert recorded(tmp_path) == [3]


KILLED = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_deploy_table import SPENT, figures, record
table = record(Path({folder!r}))
table.keep(upto=10**6)
print("begun", flush=True)
for round in range(table.table.last + 1, 10**6):
    table.add(round, figures(round), SPENT)
"""


def test_sigkill_at_any_moment_leaves_whole_rounds(tmp_path: Path) -> None:
    script = KILLED.format(paths=[p for p in sys.path if p], folder=str(tmp_path))
    reached = -1
    for more in (1, 40, 90):
        process = Forked(tmp_path, python, script)
        while len(recorded(tmp_path) if (tmp_path / "metrics.csv").exists() else []) < reached + 1 + more:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        again = record(tmp_path)
        again.keep(upto=10**6)
        assert recorded(tmp_path) == list(range(again.table.last + 1))
        assert again.table.last > reached
        reached = again.table.last


def test_a_member_whose_table_is_torn_ends_with_every_round_once(tmp_path: Path) -> None:
    """And so does one whose table is ahead of its state, as after a power cut between the two."""
    run = stopped(describe(GECL, rounds=6, limits={"wait": 8.0}), tmp_path, at=3)
    torn, ahead = tmp_path / "a" / "metrics.csv", tmp_path / "b" / "metrics.csv"
    torn.write_text(torn.read_text() + torn.read_text().splitlines()[-1][:17])
    ahead.write_text(ahead.read_text() + ahead.read_text().splitlines()[-1].replace("3,3,", "3,6,", 1) + "\n")
    Started(run).end()
    assert not run.errors
    for name in "ab":
        assert recorded(tmp_path / name) == list(range(7))
        assert [row["round"] for row in load_record(tmp_path / name).rows] == list(range(7))
