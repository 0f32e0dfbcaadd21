"""What a run leaves behind, that it can be reproduced, and sweeps."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from command_line import SMALL, experiment_file, holdfast, make_plan, rows, run_plan
from safetensors.torch import load_file
from sample_run import COSTS, DEFAULT_METRICS

import holdfast as hf
from holdfast.data import DATASETS
from holdfast.experiments.plan import Plan
from holdfast.experiments.record import load_record
from holdfast.models import mlp
from holdfast.report.page_data import setting_data
from holdfast.report.setting_figures import setting_plots
from holdfast.report.terminal import summary_table

ONE_METRIC = 'metrics=["train_loss"]'  # pictures take time


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two algorithms with two seeds, by the command line."""
    root = tmp_path_factory.mktemp("finished")
    outcome = holdfast(
        "run", experiment_file(root), "seeds=[0,1]", "--runs-dir", root / "runs", "--tensorboard", "-q"
    )
    assert (outcome.code, outcome.err) == (0, "")
    [folder] = (root / "runs").iterdir()
    assert outcome.out == f"{folder}\n"
    return folder


def test_everything_promised_is_in_the_run_directory(finished: Path) -> None:
    jobs = [
        f"{i:03d}-{name}-seed{seed}" for i, name in enumerate(["local-gecl", "gossip"]) for seed in (0, 1)
    ]
    assert finished.name.startswith("small-20")
    for name in ("experiment.toml", "environment.json", "metrics.csv", "summary.json", "report.html"):
        assert (finished / name).stat().st_size > 0
    for folder in ("checkpoints", "models"):
        assert sorted(path.name for path in (finished / folder).iterdir()) == sorted(
            f"{job}.safetensors" for job in jobs
        )
    plots = {path.name for path in (finished / "plots").iterdir()}
    for stem in ("test_accuracy", "train_loss", "consensus", "network", "partition"):
        assert {f"{stem}.png", f"{stem}.svg"} <= plots
    assert not list(finished.rglob("*.partial"))


def test_metrics_are_tidy(finished: Path) -> None:
    header = (finished / "metrics.csv").read_text().splitlines()[0]
    assert header.split(",") == ["algorithm", "seed", "round", *DEFAULT_METRICS, "minibatch_loss", *COSTS]
    assert [(row["algorithm"], row["seed"], row["round"]) for row in rows(finished)] == [
        (algorithm, seed, round)
        for algorithm in ("local-gecl", "gossip")
        for seed in ("0", "1")
        for round in ("0", "2", "4")
    ]
    # d = 64 * 8 + 8 + 8 * 10 + 10; local G-ECL sends two vectors over each of 8 directed links, gossip one
    assert rows(finished)[2]["payload_bytes"] == str(4 * 8 * 2 * 610 * 4)
    assert rows(finished)[-1]["payload_bytes"] == str(4 * 8 * 610 * 4)
    assert rows(finished)[2]["payload_bytes_per_link"] == str(4 * 2 * 610 * 4.0)
    assert rows(finished)[2]["gradient_evaluations"] == str(4 * 4 * 2)
    assert rows(finished)[2]["sample_gradients"] == str(4 * 4 * 2 * 8)


def test_the_summary_says_what_became_of_every_job(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert [(job["algorithm"], job["seed"], job["status"], job["round"]) for job in summary["jobs"]] == [
        ("local-gecl", 0, "done", 4),
        ("local-gecl", 1, "done", 4),
        ("gossip", 0, "done", 4),
        ("gossip", 1, "done", 4),
    ]
    assert summary["facts"]["dimension"] == 610
    assert summary["facts"]["samples"] == 1437


def test_the_environment_tells_versions_device_seeds_and_commit(finished: Path) -> None:
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["device"] == "cpu"
    assert environment["seeds"] == [0, 1]
    assert {"holdfast", "python", "numpy", "commit", "platform", "cores", "threads"} <= set(environment)


def test_the_resolved_experiment_gives_the_same_metrics_again(finished: Path, tmp_path: Path) -> None:
    resolved = tomllib.loads((finished / "experiment.toml").read_text())
    assert resolved["seeds"] == [0, 1]
    assert resolved["problem"]["weights"] == "uniform"  # defaults are written out
    again = run_plan(Plan.of_file(finished / "experiment.toml", [], None, "cpu"), tmp_path)
    assert rows(again) == rows(finished)
    assert (again / "experiment.toml").read_bytes() == (finished / "experiment.toml").read_bytes()


def test_final_models_load_into_the_plain_module(finished: Path) -> None:
    digits = DATASETS.build("digits", {})
    recorded = [row for row in rows(finished) if row["round"] == "4"]
    for path, row in zip(sorted((finished / "models").iterdir()), recorded, strict=True):
        module = mlp(input_shape=(1, 8, 8), outputs=10, hidden=[8])
        module.load_state_dict(load_file(path))
        right = module(digits.x_test).argmax(-1) == digits.y_test
        assert float(right.double().mean()) == pytest.approx(float(row["average_accuracy"]), abs=1e-12)


def test_tensorboard_has_every_recorded_figure(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard" / "001-gossip-seed1"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*DEFAULT_METRICS, "minibatch_loss", *COSTS}
    mine = [row for row in rows(finished) if (row["algorithm"], row["seed"]) == ("gossip", "1")]
    logged = [(scalar.step, scalar.value) for scalar in events.Scalars("train_loss")]
    assert [step for step, _ in logged] == [0, 2, 4]
    assert [value for _, value in logged] == pytest.approx(
        [float(row["train_loss"]) for row in mine], rel=1e-6
    )


def test_an_algorithm_alone_gives_the_rows_it_gives_beside_others(finished: Path, tmp_path: Path) -> None:
    alone = SMALL[: SMALL.index("[[algorithm]]")] + SMALL[SMALL.rindex("[[algorithm]]") :]
    folder = run_plan(make_plan(tmp_path, "seeds=[0,1]", text=alone), tmp_path)
    assert rows(folder) == [row for row in rows(finished) if row["algorithm"] == "gossip"]


def test_all_algorithms_start_alike_and_seeds_differ(finished: Path) -> None:
    start = {(row["algorithm"], row["seed"]): row for row in rows(finished) if row["round"] == "0"}
    for metric in DEFAULT_METRICS:
        assert start["gossip", "0"][metric] == start["local-gecl", "0"][metric]
    assert start["gossip", "0"]["train_loss"] != start["gossip", "1"]["train_loss"]


def test_partition_and_network_are_kept_as_tables(finished: Path) -> None:
    partition = [line.split(",") for line in (finished / "partition.csv").read_text().splitlines()]
    assert partition[0] == ["node", "samples", *map(str, range(10))]
    assert sum(int(line[1]) for line in partition[1:]) == 1437
    assert all(int(line[1]) == sum(map(int, line[2:])) for line in partition[1:])
    links = (finished / "network.csv").read_text().splitlines()
    assert [line.rsplit(",", 1)[0] for line in links] == ["i,j", "0,1", "0,3", "1,2", "2,3"]


def test_organisations_are_called_by_their_names(tmp_path: Path) -> None:
    rows_of = {"north": 6, "south, east": 4}  # a name with a comma
    lines = ["hospital,age,ill"]
    lines += [f'"{name}",{age},{age % 2}' for name, count in rows_of.items() for age in range(count)]
    (tmp_path / "patients.csv").write_text("\n".join(lines) + "\n")
    table = hf.from_frame(tmp_path / "patients.csv", target="ill", node="hospital")
    hf.train(
        hf.FedAvg(lr=0.1),
        model=torch.nn.Linear(1, 2),
        data=table,
        rounds=1,
        run_dir=tmp_path / "run",
        progress=False,
    )
    partition = (tmp_path / "run" / "partition.csv").read_text().splitlines()
    assert partition == ["node,name,samples,0,1", "0,north,6,3,3", '1,"south, east",4,2,2']
    record = load_record(tmp_path / "run")
    assert record.partition is not None
    assert record.partition.names == ["north", "south, east"]
    shown = setting_data(record)
    assert shown is not None
    assert shown["names"] == ["north", "south, east"]
    [network, heat_map] = [plot.figure.axes[0] for plot in setting_plots(record)]
    assert {"north", "south, east"} <= {text.get_text() for text in network.texts}
    assert [label.get_text() for label in heat_map.get_yticklabels()] == ["north  (6)", "south, east  (4)"]


@pytest.mark.parametrize(
    ("cells", "heads"),
    [
        (("yes", "no"), "no,yes"),
        (("True", "False"), "False,True"),
        (("0", "1"), "0,1"),
    ],
)
@pytest.mark.parametrize("node", [True, False])
def test_classes_are_called_by_their_names(
    tmp_path: Path, cells: tuple[str, str], heads: str, node: bool
) -> None:
    lines = ["hospital,age,ill", *(f"{'ab'[i % 2]},{i},{cells[i % 3 == 0]}" for i in range(12))]
    file = tmp_path / "patients.csv"
    file.write_text("\n".join(lines if node else [line[line.index(",") + 1 :] for line in lines]))
    named = {"name": "csv", "file": str(file), "target": "ill"} | ({"node": "hospital"} if node else {})
    frame = hf.from_frame(file, target="ill", node="hospital" if node else None)
    whole = frame if node else hf.partition(frame, None, hf.IID(), nodes=2)
    for order, data in enumerate((named, whole)):
        folder = tmp_path / f"run{order}"
        hf.train(
            hf.FedAvg(lr=0.1),
            model=torch.nn.Linear(1, 2),
            data=data,
            nodes=2 if data is named else None,
            rounds=1,
            run_dir=folder,
            progress=False,
        )
        head = (folder / "partition.csv").read_text().splitlines()[0]
        assert head.split("samples,")[1] == heads
        record = load_record(folder)
        [_, heat_map] = [plot.figure.axes[0] for plot in setting_plots(record)]
        assert [label.get_text() for label in heat_map.get_xticklabels()] == heads.split(",")


# --- divergence --------------------------------------------------------------------------------------------


def test_divergence_stops_one_algorithm_and_not_the_others(tmp_path: Path) -> None:
    overrides = ["algorithm.gossip.lr=1e30", ONE_METRIC]
    outcome = holdfast("run", experiment_file(tmp_path), *overrides, "--runs-dir", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "gossip diverged: a figure became infinite or NaN by round 2: try a smaller lr" in outcome.out
    [folder] = tmp_path.glob("small-*")
    jobs = json.loads((folder / "summary.json").read_text())["jobs"]
    assert [(job["algorithm"], job["status"], job["round"]) for job in jobs] == [
        ("local-gecl", "done", 4),
        ("gossip", "diverged", 2),
    ]
    assert [(row["algorithm"], row["round"]) for row in rows(folder)] == [
        ("local-gecl", "0"),
        ("local-gecl", "2"),
        ("local-gecl", "4"),
        ("gossip", "0"),
        ("gossip", "2"),
    ]
    assert [path.name for path in (folder / "models").iterdir()] == ["000-local-gecl-seed0.safetensors"]
    assert "diverged" in (folder / "report.html").read_text()
    assert "gossip: diverged at round 2" in str(summary_table([load_record(folder)]).caption)


def test_a_run_whose_algorithms_all_diverge_fails(tmp_path: Path) -> None:
    overrides = ["algorithm.lr=1e30", ONE_METRIC]
    outcome = holdfast("run", experiment_file(tmp_path), *overrides, "--runs-dir", tmp_path, "-q")
    assert outcome.code == 1


def test_divergence_is_seen_without_a_loss_among_the_metrics(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "algorithm.gossip.lr=1e30", 'metrics=["test_accuracy"]')
    jobs = json.loads((run_plan(plan, tmp_path) / "summary.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "diverged"]


# --- sweeps ------------------------------------------------------------------------------------------------


def swept(folder: Path, *overrides: str) -> list[tuple[str, dict]]:
    """(algorithm, swept values) of every variant."""
    return [(job.label, dict(job.axes)) for job in make_plan(folder, *overrides).jobs]


def test_a_list_is_a_sweep(tmp_path: Path) -> None:
    assert swept(tmp_path, "algorithm.lr=[0.1,0.01]") == [
        ("local-gecl", {"algorithm.lr": 0.1}),
        ("local-gecl", {"algorithm.lr": 0.01}),
        ("gossip", {"algorithm.lr": 0.1}),
        ("gossip", {"algorithm.lr": 0.01}),
    ]
    assert swept(tmp_path, 'network.topology=["ring","complete"]') == [
        ("local-gecl", {"network.topology": "ring"}),
        ("gossip", {"network.topology": "ring"}),
        ("local-gecl", {"network.topology": "complete"}),
        ("gossip", {"network.topology": "complete"}),
    ]


def test_an_override_may_name_one_algorithm(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "algorithm.gossip.lr=[0.2,0.4]", "algorithm.local_steps=3")
    assert [(job.config.parameters, job.axes) for job in plan.jobs] == [
        ({"lr": 0.1, "local_steps": 3}, {}),
        ({"lr": 0.2, "local_steps": 3}, {"algorithm.lr": 0.2}),
        ({"lr": 0.4, "local_steps": 3}, {"algorithm.lr": 0.4}),
    ]


def test_lists_that_are_values_are_no_sweeps(tmp_path: Path) -> None:
    assert [axes for _, axes in swept(tmp_path, "problem.model.hidden=[8,8]")] == [{}, {}]
    assert [axes for _, axes in swept(tmp_path, 'metrics=["train_loss","consensus"]')] == [{}, {}]
    widths = [axes["problem.model.hidden"] for _, axes in swept(tmp_path, "problem.model.hidden=[[8],[9]]")]
    assert widths == [[8], [8], [9], [9]]


def test_swept_keys_are_columns(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, "problem.partition.h=[0.5,inf]", "seeds=[0,3]", "rounds=1", "algorithm.lr=[0.1]"
    )
    folder = run_plan(plan, tmp_path)
    header = (folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header[:5] == ["algorithm", "seed", "problem.partition.h", "algorithm.lr", "round"]
    found = [
        (row["algorithm"], row["seed"], row["problem.partition.h"], row["round"]) for row in rows(folder)
    ]
    assert found == [
        (algorithm, seed, h, round)
        for h in ("0.5", "inf")
        for algorithm in ("local-gecl", "gossip")
        for seed in ("0", "3")
        for round in ("0", "1")
    ]
    unlike, alike = (
        row for row in rows(folder) if row["algorithm"] + row["seed"] + row["round"] == "gossip01"
    )
    assert unlike["train_loss"] != alike["train_loss"]
    assert len(load_record(folder).final_table()) == 4


# --- models of the user's own ------------------------------------------------------------------------------

MODEL = """
from torch import nn

class Tied(nn.Module):
    def __init__(self, outputs, width: int = 6):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.middle = nn.Linear(width, width)
        self.same = self.middle
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        return self.last(self.same(self.middle(self.first(x.flatten(1)))))
"""


def test_a_model_of_the_users_own_with_tied_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_of_test_runs.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan = make_plan(tmp_path, 'problem.model={name="own_model_of_test_runs:Tied",width=5}', "rounds=1")
    folder = run_plan(plan, tmp_path)
    from own_model_of_test_runs import Tied  # type: ignore[import-not-found]

    module = Tied(10, width=5)
    module.load_state_dict(load_file(folder / "models" / "000-local-gecl-seed0.safetensors"))
    assert json.loads((folder / "summary.json").read_text())["facts"]["dimension"] == 325 + 30 + 60


# --- the report command ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reports_can_be_written_again_and_overlaid(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_plan(make_plan(tmp_path, ONE_METRIC), tmp_path).rename(first)
    shutil.copytree(first, second)
    assert holdfast("report", first).code == 0
    assert (first / "report.html").read_text().startswith("<!DOCTYPE html>")
    outcome = holdfast("report", first, second, "-o", tmp_path / "both.html")
    assert outcome.code == 0
    assert str(tmp_path / "both.html") in outcome.out
    for label in ("first: gossip", "second: gossip"):
        assert label in (tmp_path / "both.html").read_text()


def test_the_seeds_of_a_sweep_take_turns_without_reading_the_data_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.of_file(finished / "experiment.toml", ["seeds=[0,1]"], None, "cpu")
    first, second = plan.jobs[:2]
    assert not plan.shares_setting(first, second)
    kept = plan.setting(first)
    plan.setting(second)
    assert plan.setting(first) is kept
    monkeypatch.setattr("holdfast.experiments.plan.MOST_KEPT", 0)
    plan.setting(second)
    assert plan.setting(first) is not kept


def test_samples_that_are_prepared_once_count_as_memory(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.of_file(finished / "experiment.toml", ["problem.batch_size=full"], None, "cpu")
    job = plan.jobs[0]
    with_them, numbers = plan.memory(job), plan.setting(job).data.x.numel()
    monkeypatch.setattr("holdfast.experiments.setting.MOST_READY", 0)
    assert with_them - plan.memory(job) == 4 * numbers
