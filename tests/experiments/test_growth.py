"""A run whose figures are finite but grow without bound is not called done; a noisy one is."""

from __future__ import annotations

import json
import math
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import SMALL, experiment_file, holdfast
from report_page import Page
from torch import nn

import holdfast as hf
from holdfast.experiments.growth import unbounded
from holdfast.experiments.record import load_record

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


def measured(rounds: int, every: int = 1, **figures: Callable[[int], float]) -> list[dict[str, float]]:
    """Rows of a run, every figure a function of the round."""
    at = sorted({*range(0, rounds + 1, every), rounds})
    return [{"round": r, **{name: figure(r) for name, figure in figures.items()}} for r in at]


def noise(size: float) -> Callable[[int], float]:
    return lambda r: 2.3 if r == 0 else size * (1 + 0.5 * np.random.default_rng(r).standard_normal())


DIVERGED: dict[str, list[dict[str, float]]] = {
    "consensus, though the loss of the average fell": measured(
        800, 20, train_loss=lambda r: 0.2 if r else 2.3, consensus=lambda r: 1.03**r
    ),
    "loss": measured(100, train_loss=lambda r: 1.3**r),
    "loss, from a large start": measured(100, train_loss=lambda r: 1e9 * 1.3**r),
    "loss, so slowly that it is only some hundred times the start": measured(
        200, 5, train_loss=lambda r: 2.3 * 1.03**r
    ),
    "distance to the optimum": measured(100, optimum_distance=lambda r: 1.3**r),
    "nothing but the last round was measured": measured(50, 50, train_loss=lambda r: 1.9**r),
    "in a single round": measured(1, train_loss=lambda r: 1e20 if r else 2.3),
    "at the very end": measured(100, 10, train_loss=lambda r: 0.1 if r < 100 else 1e8),
}

HEALTHY: dict[str, list[dict[str, float]]] = {
    "nothing measured": [],
    "no round": measured(0, train_loss=lambda r: 2.3),
    "one round that went too far": measured(
        1, train_loss=lambda r: 2.3 if r == 0 else 3e4, consensus=lambda r: r * 1e7
    ),
    "two rounds of a large model": measured(2, consensus=lambda r: 1e9 * r**2),
    "more noise than signal": measured(200, 5, train_loss=noise(140), average_loss=noise(140)),
    "a random walk": measured(200, 5, train_loss=lambda r: 2.3 + 20 * math.sqrt(r)),
    "nodes that never speak": measured(1000, consensus=lambda r: 1e3 * r**2, train_loss=lambda r: 3.0),
    "a large loss of rare mistakes": measured(100, train_loss=lambda r: 2.3 if r == 0 else 50.0),
    "a bad start": measured(100, train_loss=lambda r: 1e9 * 0.9**r, consensus=lambda r: 1e9 * r * 0.9**r),
    "a peak half-way": measured(100, consensus=lambda r: 1e8 if r < 80 else 1e-3, train_loss=lambda r: 1.0),
    "an objective without a lower bound": measured(100, train_loss=lambda r: -(1.5**r)),
    "undefined figures": measured(100, minibatch_loss=lambda r: math.nan, test_accuracy=lambda r: r * 1e9),
}


@pytest.mark.parametrize("rows", DIVERGED.values(), ids=DIVERGED)
def test_growth_without_bound_is_seen(rows: list[dict[str, float]]) -> None:
    assert "grew from" in (unbounded(rows) or "")


@pytest.mark.parametrize("rows", HEALTHY.values(), ids=HEALTHY)
def test_noise_drift_and_short_runs_are_no_divergence(rows: list[dict[str, float]]) -> None:
    assert unbounded(rows) is None


def test_the_words_name_figure_rounds_and_sizes() -> None:
    rows = measured(100, 10, train_loss=lambda r: 1.0, consensus=lambda r: 2.0**r)
    assert unbounded(rows) == "the consensus grew from 1.13e+15 at round 50 to 1.27e+30"


def train(run_dir: Path | None = None, **options: Any) -> hf.TrainResult:
    """Least squares with full gradients: beyond lr = 2/L the error grows by a constant factor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
    given: dict[str, Any] = {"lr": 1.5, "rounds": 60, "run_dir": run_dir, **options}
    return hf.train(
        hf.FedAvg(lr=given.pop("lr")),
        model=model,
        data=[(X[i::3], Y[i::3]) for i in range(3)],
        batch_size="full",
        loss="mse",
        dtype="float64",
        progress=False,
        **given,
    )


def test_a_run_that_grows_is_diverged_and_says_so() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"FedAvg diverged: the \w+ grew from .* at round .*: try a smaller"
    ):
        result = train()
    assert result.diverged
    assert (result.status, result.history["round"][-1]) == ("diverged", 60)
    assert all(map(math.isfinite, result.history["train_loss"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(lr=0.1).status == "done"


def test_the_channel_is_named_where_it_may_be_the_cause() -> None:
    with pytest.warns(RuntimeWarning, match="try a smaller lr, or a channel that loses less"):
        assert train(channel=hf.BFloat16()).status == "diverged"


class At(hf.Callback):
    def on_round(self, job: object, round: int) -> None:
        if round == 40:
            signal.raise_signal(signal.SIGINT)


def test_a_resumed_run_is_judged_by_all_its_rounds(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="diverged"):
        whole = train()
    assert train(tmp_path / "run", callbacks=[At()]).status == "interrupted"
    for _ in "again", "when it is settled":
        with pytest.warns(RuntimeWarning, match=r"FedAvg diverged: the \w+ grew from .* at round"):
            resumed = train(tmp_path / "run", resume=True)
        assert resumed.status == "diverged"
        assert torch.equal(resumed.models, whole.models)
    [job] = load_record(tmp_path / "run").summary["jobs"]
    assert (job["status"], job["round"]) == ("diverged", 60)
    assert "grew from" in job["message"]


def test_a_run_that_grows_is_told_wherever_figures_are(tmp_path: Path) -> None:
    wild = SMALL.replace('dataset = "digits"', 'dataset = "quadratics"')
    for line in (
        'partition = { name = "dirichlet", h = 0.5 }',
        'model = { name = "mlp", hidden = [8] }',
        "batch_size = 8",
    ):
        wild = wild.replace(f"{line}\n", "")
    outcome = holdfast(
        "run",
        experiment_file(tmp_path, wild),
        "problem.loss=squared-error",
        "problem.model=linear",
        "problem.partition=groups",
        "problem.batch_size=full",
        "algorithm.gossip.lr=3.0",
        "rounds=6",
        "evaluate_every=1",
        "--runs-dir",
        tmp_path,
    )
    assert outcome.code == 0  # one of the two ended well
    [folder] = tmp_path.glob("small-*")
    jobs = json.loads((folder / "summary.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "diverged"]
    page = " ".join(" ".join(Page((folder / "report.html").read_text()).words).split())
    for text in (" ".join(outcome.out.split()), page):
        assert "gossip diverged: the" in text
    [_, line] = json.loads(holdfast("report", folder, "--json").out)["runs"][0]["results"]
    assert (line["status"], line["note"]) == ("diverged", "diverged at round 6")


def test_compare_tells_of_growth_and_ranks_it_with_none() -> None:
    with pytest.warns(RuntimeWarning, match="wild: diverged at round 30"):
        found = hf.compare(
            {"wild": hf.FedAvg(lr=1.2), "calm": hf.FedAvg(lr=0.1)},
            model=nn.Linear(4, 1),
            data=[(X[i::3].float(), Y[i::3].float()) for i in range(3)],
            batch_size="full",
            loss="mse",
            rounds=30,
            progress=False,
        )
    assert found.statuses == {("wild", 0): "diverged", ("calm", 0): "done"}
    assert "wild: diverged at round 30" in found.table()
    assert isinstance(found.model("wild"), nn.Linear)  # its numbers are finite
