"""Runs on several processes as a user starts, stops and breaks them: real torchrun, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import experiment_file, holdfast, process
from devices import on_gpu
from test_cluster import assert_same, figures

from holdfast.engines.cluster.launch import launch_id, run_to_continue
from holdfast.experiments.plan import Plan
from holdfast.experiments.runner import Runner

EXPERIMENT = """\
name = "long"
rounds = 300
checkpoint_every = 20
dtype = "float64"
evaluate_every = 10
metrics = ["train_loss", "consensus"]

[problem]
dataset = "penalised-logistic"
nodes = 5
partition = "groups"
loss = "logistic"
model = "linear"

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 2
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
# Breaks on one rank only, after some rounds.
MODEL = """
import os
import torch

class Model(torch.nn.Linear):
    calls = 0

    def __init__(self):
        super().__init__(20, 1)

    def forward(self, x):
        Model.calls += 1
        if Model.calls > 100 and os.environ.get("RANK") == "1":
            raise ArithmeticError("out of cheese")
        return super().forward(x)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    root = tmp_path_factory.mktemp("whole")
    runner = Runner.start(Plan.of_file(experiment_file(root, EXPERIMENT), [], None, "cpu"), root)
    runner.execute()
    return figures(runner.folder)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(running: subprocess.Popen[str], folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + 120
    while sum(path.read_text().count("\n") - 1 for path in folder.glob("runs/*/metrics.csv")) < wanted:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path, undisturbed) -> None:
    experiment = str(experiment_file(tmp_path, EXPERIMENT))
    ranks = ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "holdfast", "run", experiment, "-q"]
    running = start(tmp_path, *TORCHRUN, *ranks)
    wait_for_rows(running, tmp_path, wanted=4)
    os.kill(children(running.pid)[1], signal.SIGKILL)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    [run] = tmp_path.glob("runs/*")
    assert out == f"runs/{run.name}\n"
    assert_same(figures(run), undisturbed)
    assert (run / "report.html").exists()


def test_a_job_that_is_started_again_finds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status in (("old", "complete"), ("mine", "interrupted"), ("other", "running")):
        (tmp_path / name).mkdir()
        launch = "job-2" if name == "other" else "job-1"
        text = json.dumps({"launch": launch, "digest": "abc", "status": status})
        (tmp_path / name / "summary.json").write_text(text)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert run_to_continue(tmp_path, launch_id(), "abc") == tmp_path / "mine"
    assert run_to_continue(tmp_path, launch_id(), "another experiment") is None
    (tmp_path / "mine" / "summary.json").write_text("damaged")
    assert run_to_continue(tmp_path, launch_id(), "abc") is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # then only the report may be missing
    assert run_to_continue(tmp_path, launch_id(), "abc") == tmp_path / "old"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert run_to_continue(tmp_path, launch_id(), "abc") is None


def test_a_job_without_an_id_goes_on_only_when_torchrun_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (tmp_path / "run").mkdir()
    text = json.dumps({"launch": launch_id(), "digest": "abc", "status": "running"})
    (tmp_path / "run" / "summary.json").write_text(text)
    assert run_to_continue(tmp_path, launch_id(), "abc") is None  # another container's torchrun, as number 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_to_continue(tmp_path, launch_id(), "abc") == tmp_path / "run"


@pytest.mark.slow
def test_more_ranks_than_nodes(tmp_path: Path) -> None:
    experiment = experiment_file(tmp_path, EXPERIMENT)
    running = process("run", experiment, "problem.nodes=2", "--processes", "3", cwd=tmp_path)
    out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (2, "")
    assert err == "error: 3 ranks for 2 nodes: every rank holds at least one; start fewer ranks\n"
    assert not list(tmp_path.glob("runs/*"))


def test_a_rank_without_a_master_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = holdfast("run", experiment_file(tmp_path, EXPERIMENT))
    assert (outcome.code, outcome.out) == (2, "")
    assert "the environment lacks MASTER_ADDR and MASTER_PORT: start the ranks with torchrun" in outcome.err
    outcome = holdfast("run", experiment_file(tmp_path, EXPERIMENT), "--processes=2")
    assert "processes: torchrun has started the processes already" in outcome.err


LEAVING = """
import sys
from pathlib import Path

from holdfast.engines.cluster.ranks import joined


def of_the_group():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


try:
    with joined() as world:
        import torch._dynamo  # as preparing rounds does; it imports functions that know the group

        world.wait()
        print(len(of_the_group()))
        if len(sys.argv) > 1:
            sys.exit(int(sys.argv[1]))
except SystemExit:
    pass
print(len(of_the_group()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [[], ["130"]], ids=["done", "interrupted"])
def test_a_rank_ends_the_threads_of_its_process_group_however_it_leaves(code, tmp_path: Path) -> None:
    """One that still holds an object of Python's when the process ends may abort it."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    [(_, out, err), _] = two_ranks(tmp_path, ["leaving.py", *code], ["leaving.py", *code])
    during, after = map(int, out.split())
    assert during > 0, err
    assert after == 0


def two_ranks(folder: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    printed = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, printed, strict=True)]


@pytest.mark.slow
def test_ranks_that_disagree_about_the_experiment(tmp_path: Path) -> None:
    run = ["-m", "holdfast", "run", str(experiment_file(tmp_path, EXPERIMENT))]
    outcomes = two_ranks(tmp_path, [*run, "rounds=10"], [*run, "rounds=11"])
    expected = "rank 1 has another experiment than rank 0: give all ranks the same file and the same changes"
    assert outcomes == [(2, "", f"error: {expected}\n"), (2, "", "")]


@pytest.mark.slow
def test_ranks_with_other_versions(tmp_path: Path) -> None:
    (tmp_path / "other_version.py").write_text(
        "import holdfast, holdfast.cli\nholdfast.__version__ = '99.0'\nholdfast.cli.main()\n"
    )
    run = ["run", str(experiment_file(tmp_path, EXPERIMENT))]
    outcomes = two_ranks(tmp_path, ["-m", "holdfast", *run], ["other_version.py", *run])
    expected = "rank 1 has another version of holdfast than rank 0: install the same on all machines"
    assert outcomes == [(2, "", f"error: {expected}\n"), (2, "", "")]
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_all_ranks(number: signal.Signals, tmp_path: Path, undisturbed) -> None:
    running = process("run", experiment_file(tmp_path, EXPERIMENT), "-q", "--processes", "2", cwd=tmp_path)
    wait_for_rows(running, tmp_path, wanted=3)
    os.kill(running.pid, number)
    _, err = running.communicate(timeout=120)
    [run] = tmp_path.glob("runs/*")
    assert running.returncode == 130
    assert err == f"stopped, all is saved; continue with: holdfast resume runs/{run.name}\n"
    assert 0 < len(figures(run)) < len(undisturbed)
    resumed = process("resume", run, "-q", "--processes=3", cwd=tmp_path)
    assert resumed.communicate(timeout=200) == (f"{run}\n", "")
    assert_same(figures(run), undisturbed)


@on_gpu
@pytest.mark.parametrize("network", ["ring", "server"])
def test_a_rank_on_a_gpu_replays_its_rounds(network: str, tmp_path: Path) -> None:
    experiment = experiment_file(tmp_path, EXPERIMENT)
    options = [experiment, f"network.topology={network}", "--device", "cuda", "-q"]
    for extra in ([], ["--processes", "1"]):
        running = process("run", *options, "--runs-dir", f"runs{len(extra)}", *extra, cwd=tmp_path)
        _, err = running.communicate(timeout=300)
        assert running.returncode == 0, err
    [alone], [rank] = tmp_path.glob("runs0/*"), tmp_path.glob("runs2/*")
    assert "rounds replayed from a CUDA graph" in (rank / "summary.json").read_text()
    assert_same(figures(rank), figures(alone))


@pytest.mark.slow
def test_a_rank_that_dies_shows_its_own_error_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    experiment = experiment_file(tmp_path, EXPERIMENT)
    running = process("run", experiment, "problem.model=mine:Model", "-q", "--processes", "3", cwd=tmp_path)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    lines = err.splitlines()
    assert lines[0] == "[rank1]: Traceback (most recent call last):"
    own = lines.index("[rank1]: ArithmeticError: out of cheese")
    assert not any("lost contact" in line for line in lines[:own])
