"""Writes small run directories with numbers one can check by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

COSTS = ["payload_bytes", "payload_bytes_per_link", "gradient_evaluations", "sample_gradients", "seconds"]
DEFAULT_METRICS = [
    "test_accuracy",
    "worst_accuracy",
    "average_accuracy",
    "average_loss",
    "train_loss",
    "consensus",
]
MIB = 2**20
EXPERIMENT = """\
name = "sample"
rounds = 20
seeds = [0, 1]

[problem]
dataset = { name = "digits" }
partition = { name = "dirichlet", h = 0.1 }
model = { name = "mlp", hidden = [64] }
nodes = 3

[network]
topology = { name = "ring" }
"""
FACTS = {"nodes": 3, "directed_links": 6, "spectral_lambda": 0.0, "mixing_parameter": 1.0, "samples": 1440}


def job(
    algorithm: str,
    seed: int,
    rows: list[dict[str, Any]],
    status: str = "done",
    axes: dict | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A job with its rows; a row holds a round and metrics."""
    last = rows[-1]["round"] if rows else 0
    entry = {
        "algorithm": algorithm,
        "seed": seed,
        "axes": axes or {},
        "status": status,
        "round": last,
        "rounds": last if status == "done" else 20,
    }
    return {"id": f"{algorithm}-{seed}", **entry, "seconds": last / 2, **extra, "rows": rows}


def accuracies(*values: float) -> list[dict[str, Any]]:
    """Rows at the rounds 0, 10, 20, ... with these accuracies; loss and consensus follow from them."""
    return [
        {
            "round": 10 * i,
            "test_accuracy": value,
            "train_loss": 1 - value,
            "consensus": 0.0 if i == 0 else 10.0**-i,
        }
        for i, value in enumerate(values)
    ]


def write_run(
    folder: Path,
    jobs: list[dict[str, Any]],
    *,
    name: str = "sample",
    status: str = "complete",
    axes: tuple[str, ...] = (),
    metrics: tuple[str, ...] = ("test_accuracy", "train_loss", "consensus"),
    partition: str = "node,samples,cat,dog\n0,7,3,4\n1,5,5,0\n2,4,0,4\n",
    network: str = "i,j,weight\n0,1,0.5\n0,2,0.25\n1,2,0.25\n",
    experiment: str = EXPERIMENT,
) -> Path:
    """A directory as ``holdfast run`` leaves it; a round takes 1 MiB, for gossip half, and 100 gradients."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["algorithm", "seed", *axes, "round", *metrics, *COSTS])
        writer.writeheader()
        for one in jobs:
            start = {"algorithm": one["algorithm"], "seed": one["seed"], **one["axes"]}
            for row in one["rows"]:
                sent = row["round"] * (MIB // 2 if "gossip" in one["algorithm"] else MIB)
                costs = [sent, sent / 6, 100 * row["round"], 3200 * row["round"], row["round"] / 2]
                writer.writerow(start | row | dict(zip(COSTS, costs, strict=True)))
    entries = [{key: value for key, value in one.items() if key != "rows"} for one in jobs]
    summary = {"name": name, "status": status, "jobs": entries, "facts": FACTS}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "experiment.toml").write_text(experiment)
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "note": "a <b> & c"}))
    (folder / "partition.csv").write_text(partition)
    (folder / "network.csv").write_text(network)
    return folder


def two_algorithms(folder: Path, **options: Any) -> Path:
    """local-gecl above gossip, two seeds each, everything done."""
    return write_run(
        folder,
        [
            job("local-gecl", 0, accuracies(0.1, 0.8, 0.9)),
            job("local-gecl", 1, accuracies(0.1, 0.7, 0.94)),
            job("gossip", 0, accuracies(0.1, 0.6, 0.5)),
            job("gossip", 1, accuracies(0.1, 0.5, 0.6)),
        ],
        **options,
    )


def troubled_sweep(folder: Path, **options: Any) -> Path:
    """A sweep over lr that was interrupted, with a divergence and jobs that never began."""
    blown = {"round": 20, "test_accuracy": 0.1, "train_loss": float("nan"), "consensus": float("inf")}
    large, small = {"algorithm.lr": "0.1"}, {"algorithm.lr": "0.01"}
    return write_run(
        folder,
        [
            job("local-gecl", 0, accuracies(0.1, 0.8, 0.9), axes=large),
            job("local-gecl", 1, accuracies(0.1, 0.7, 0.94), axes=large),
            job("local-gecl", 0, accuracies(0.1, 0.4, 0.6), axes=small),
            job("local-gecl", 1, accuracies(0.1, 0.2), "running", axes=small),
            job("<b>&gossip", 0, accuracies(0.1, 0.6, 0.5), axes=large),
            job(
                "<b>&gossip",
                1,
                [*accuracies(0.1, 0.3), blown],
                "diverged",
                axes=large,
                message="NaN: <smaller> lr",
            ),
            job("<b>&gossip", 0, [], "pending", axes=small),
            job("<b>&gossip", 1, [], "pending", axes=small),
        ],
        status="interrupted",
        axes=("algorithm.lr",),
        **options,
    )
