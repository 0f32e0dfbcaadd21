"""A run that is given more rounds ends like one that had them from the start, to the last bit."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import SMALL, experiment_file, holdfast
from forks import Forked, python
from test_run_dir import At, interrupt, network, rows, same, train
from toy_channels import Grid

import holdfast as hf
from holdfast.experiments.record import load_record

CASES: dict[str, dict[str, Any]] = {
    "a graph, momentum that is kept": {},
    "a last round that would not have been measured": {"evaluate_every": 4},
    "a cadence that is chosen": {"evaluate_every": "auto"},
    "a channel with memory": {"channel": Grid()},
    "a server with a cohort": {
        "algorithm": hf.SCAFFOLD(lr=0.1, local_steps=2),
        "topology": "server",
        "cohort": 2,
    },
    "server momentum": {
        "algorithm": hf.FedAvg(lr=0.1, server_optimizer=hf.Momentum(0.9)),
        "topology": "server",
    },
    "a schedule that goes on": {"algorithm": hf.Gossip(lr=hf.cosine(0.2, 30))},
    "a schedule that is over": {"algorithm": hf.Gossip(lr=hf.cosine(0.2, 7))},
    "AdamW": {"algorithm": hf.LocalGECL(lr=0.01, local_steps=2, optimizer=hf.AdamW(keep=True))},
    "links that change": {"algorithm": hf.Gossip(lr=0.1), "topology": {"name": "one-peer-exponential"}},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_ends_like_one_run_of_all_rounds(options: dict[str, Any], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **options | {"rounds": 23})
    first = train(tmp_path / "run", **options | {"rounds": 9})
    assert first.history["round"][-1] == 9
    second = train(tmp_path / "run", resume=True, **options | {"rounds": 14})
    assert (second.status, second.history["round"][-1]) == ("done", 14)
    assert same(train(tmp_path / "run", resume=True, **options | {"rounds": 23}), whole)
    record = load_record(tmp_path / "run")
    assert record.summary["status"] == "complete"
    [job] = record.summary["jobs"]
    assert (job["status"], job["round"], job["rounds"]) == ("done", 23, 23)
    assert record.config["rounds"] == 23
    written = [
        [row["round"] for row in csv.DictReader((tmp_path / name / "metrics.csv").open())]
        for name in ("run", "whole")
    ]
    assert written[0] == written[1]
    models = [
        (tmp_path / name / "models" / f"{job['id']}.safetensors").read_bytes() for name in ("run", "whole")
    ]
    assert models[0] == models[1]
    # Asked again, it has nothing left to do.
    assert same(train(tmp_path / "run", resume=True, **options | {"rounds": 23}), whole)


def test_a_run_that_was_interrupted_may_be_extended_at_once(tmp_path: Path) -> None:
    whole = train(rounds=20)
    train(tmp_path / "run", rounds=10, callbacks=[At(5, interrupt)])
    assert same(train(tmp_path / "run", rounds=20, resume=True), whole)


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_run_dir import At, train
kill = At({at}, lambda: os.kill(os.getpid(), signal.SIGKILL))
train(Path({folder!r}), rounds=20, callbacks=[kill], resume=True)
"""


@pytest.mark.parametrize("at", [11, 13])
def test_a_kill_in_the_rounds_that_were_added_loses_nothing(at: int, tmp_path: Path) -> None:
    whole = train(rounds=20)
    train(tmp_path / "run", rounds=10)
    process = Forked(tmp_path, python, KILLED.format(paths=sys.path, folder=str(tmp_path / "run"), at=at))
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert same(train(tmp_path / "run", rounds=20, resume=True), whole)


@pytest.mark.parametrize("patience", [1, 2, 3, 4, 5])
def test_early_stopping_stops_where_it_would_have(patience: int, tmp_path: Path) -> None:
    """Before the rounds that were added, in the very last round of the first part, or after it."""

    def run(folder: Path, **options: Any) -> hf.TrainResult:
        stopping = hf.EarlyStopping("train_loss", patience=patience, min_delta=1e9)  # no improvement counts
        return train(folder, evaluate_every=2, callbacks=[stopping], **options)

    whole = run(tmp_path / "whole", rounds=20)
    assert (whole.status, whole.history["round"][-1]) == ("stopped", 2 * patience)
    run(tmp_path / "run", rounds=6)
    assert same(run(tmp_path / "run", rounds=20, resume=True), whole)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert [s["jobs"][0]["message"] for s in summaries] == [summaries[1]["jobs"][0]["message"]] * 2


def test_a_comparison_is_extended_as_a_whole(tmp_path: Path) -> None:
    def compare(folder: Path, rounds: int, **options: Any) -> hf.Comparison:
        return hf.compare(
            {"ours": hf.LocalGECL(lr=0.1, local_steps=2), "Gossip": hf.Gossip(lr=0.1)},
            model=network,
            data=[(x, (x[:, 0] > 0).long()) for x in torch.randn(3, 20, 4, generator=torch.manual_seed(0))],
            topology="ring",
            rounds=rounds,
            seeds=(0, 1),
            evaluate_every=4,
            run_dir=folder,
            progress=False,
            **options,
        )

    def figures(found: hf.Comparison) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in found.record.rows]

    whole = compare(tmp_path / "whole", 10)
    compare(tmp_path / "run", 6)
    found = compare(tmp_path / "run", 10, resume=True)
    assert set(found.statuses.values()) == {"done"}
    assert sorted(map(str, figures(found))) == sorted(map(str, figures(whole)))


def test_one_that_grew_without_bound_grows_on_and_one_that_became_nan_does_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": hf.FedAvg(lr=400.0), "topology": "server", "batch_size": "full"}
    options |= {"loss": "mse", "model": torch.nn.Linear(4, 1), "test": None, "evaluate_every": 1}
    torch.manual_seed(0)
    x = torch.randn(4, 20, 4)
    options |= {"data": [(part, part.sum(1, keepdim=True)) for part in x]}
    with pytest.warns(RuntimeWarning, match="diverged: the"):
        assert train(tmp_path / "run", rounds=5, **options).status == "diverged"
    assert load_record(tmp_path / "run").summary["jobs"][0]["round"] == 5
    with pytest.warns(RuntimeWarning, match="infinite or NaN"):
        whole = train(rounds=60, **options)
    for rounds in (60, 90):  # it is left alone the second time
        with pytest.warns(RuntimeWarning, match="infinite or NaN"):
            more = train(tmp_path / "run", rounds=rounds, resume=True, **options)
        assert str(rows(more)) == str(rows(whole))
        assert more.history["round"][-1] < 60
        assert torch.equal(more.models.nan_to_num(), whole.models.nan_to_num())


def test_only_the_rounds_may_change_and_only_upwards(tmp_path: Path) -> None:
    train(tmp_path / "run", rounds=10)
    with pytest.raises(hf.HoldfastError, match="rounds: the run has 10 rounds already, got 7; give more"):
        train(tmp_path / "run", rounds=7, resume=True)
    with pytest.raises(hf.HoldfastError, match="began with other arguments: seed, rounds"):
        train(tmp_path / "run", rounds=20, seed=1, resume=True)
    method = hf.Gossip(lr=hf.cosine(0.2, 20))
    with pytest.raises(hf.HoldfastError, match="began with other arguments: algorithm, rounds"):
        train(tmp_path / "run", rounds=20, algorithm=method, resume=True)


def test_a_private_run_is_not_extended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": hf.FedAvg(lr=0.1), "topology": "server", "sampling": "poisson"}
    options |= {"private": hf.DP(epsilon=5, delta=1e-3, clip=1.0), "metrics": ["test_accuracy"]}
    train(tmp_path / "run", rounds=4, **options)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(hf.HoldfastError, match="noise of a private run is chosen for all its rounds, here 4"):
        train(tmp_path / "run", rounds=8, resume=True, **options)
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_an_experiment_is_extended_on_the_command_line(tmp_path: Path) -> None:
    file = experiment_file(tmp_path, SMALL)  # 4 rounds, measured every 2
    for name, rounds in (("whole", 9), ("run", 5)):
        assert holdfast("run", file, f"rounds={rounds}", "--runs-dir", tmp_path, "--name", name).code == 0
    refused = holdfast("resume", tmp_path / "run", "--rounds", 3)
    assert refused.code == 2
    assert "the run has 5 rounds already, got 3" in refused.err
    outcome = holdfast("resume", tmp_path / "run", "--rounds", 9)
    assert (outcome.code, outcome.err) == (0, "")
    records = [load_record(tmp_path / name) for name in ("run", "whole")]
    figures = [[{**row, "seconds": 0} for row in record.rows] for record in records]
    assert sorted(map(str, figures[0])) == sorted(map(str, figures[1]))
    assert records[0].config == records[1].config
    for job in records[0].summary["jobs"]:
        assert (job["status"], job["rounds"]) == ("done", 9)
        models = [record.path / "models" / f"{job['id']}.safetensors" for record in records]
        assert models[0].read_bytes() == models[1].read_bytes()
    assert holdfast("resume", tmp_path / "run").code == 0  # nothing is left, and nothing is refused
