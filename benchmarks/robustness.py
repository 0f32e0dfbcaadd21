"""Accuracy against the number of attackers: rules and attacks, with a server, on a complete graph, on a ring.

    python benchmarks/robustness.py --out robust.png

Fifteen nodes learn handwritten digits (a linear model). Rules are told how many attackers there may be, five,
or one among a node's two neighbours on the ring, not how many there are. Three seeds; accuracy is the mean
over honest nodes. Takes minutes on two cores. Figures already in the JSON file beside the image are kept.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt

import holdfast as hf

NODES, ROUNDS, SEEDS = 15, 40, (0, 1, 2)
NUMBERS = (0, 1, 3, 5)
ATTACKS = {
    "sign flip, 5 times": lambda nodes: hf.SignFlip(nodes, scale=5.0),
    "little is enough": lambda nodes: hf.LittleIsEnough(nodes, z=1.5),
    "inner product": lambda nodes: hf.InnerProduct(nodes, scale=0.5),
    "label flip": hf.LabelFlip,
}
MANY = {
    "mean": None,
    "median": hf.Median(),
    "trimmed mean": hf.TrimmedMean(5),
    "Krum": hf.Krum(5),
    "nearest neighbours, median": hf.NearestNeighbours(5),
}
NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "server": (hf.FedAvg(lr=0.1, local_steps=4), MANY),
    "complete": (hf.Gossip(lr=0.1, local_steps=4), MANY | {"clipped gossip": hf.ClippedGossip(5)}),
    "ring": (
        hf.Gossip(lr=0.1, local_steps=4),
        {
            "mean": None,
            "median": hf.Median(),
            "clipped gossip": hf.ClippedGossip(1),
        },
    ),
}


def attackers(count: int) -> list[int]:
    """Spread evenly, so that on the ring no honest node has two beside it."""
    return [NODES * i // count for i in range(count)]


def accuracy(network: str, rule: str, attack: str, count: int, seed: int, partition: Any) -> float:
    method, rules = NETWORKS[network]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = hf.train(
            method,
            model="linear",
            data="digits",
            nodes=NODES,
            partition=partition,
            topology=network,
            rounds=ROUNDS,
            batch_size=16,
            aggregation=rules[rule],
            attack=ATTACKS[attack](attackers(count)) if count else None,
            evaluate_every=ROUNDS,
            metrics=["test_accuracy"],
            seed=seed,
            progress=False,
        )
    return float(result.history["test_accuracy"][-1])


def measured(file: Path, alpha: float) -> dict[str, list[float]]:
    """Accuracies of all seeds by network, rule, attack and number of attackers."""
    found: dict[str, list[float]] = json.loads(file.read_text()) if file.exists() else {}
    for network, (_, rules) in NETWORKS.items():
        for rule in rules:
            for attack in ATTACKS:
                for count in NUMBERS:
                    key = "|".join([network, rule, attack if count else "none", str(count)])
                    if key not in found:
                        partition = hf.Dirichlet(alpha)
                        runs = [accuracy(network, rule, attack, count, seed, partition) for seed in SEEDS]
                        found[key] = runs
                        file.write_text(json.dumps(found, indent=1))
                        print(key, [round(100 * run, 1) for run in runs], flush=True)
    return found


def draw(found: dict[str, list[float]], out: Path) -> None:
    figure, axes = plt.subplots(len(NETWORKS), len(ATTACKS), figsize=(12, 8), sharex=True, sharey=True)
    colours = dict(
        zip([*MANY, "clipped gossip"], plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False)
    )
    for row, (network, (_, rules)) in zip(axes, NETWORKS.items(), strict=True):
        for place, attack in zip(row, ATTACKS, strict=True):
            for rule in rules:
                keys = ["|".join([network, rule, attack if a else "none", str(a)]) for a in NUMBERS]
                runs = [[100 * run for run in found[key]] for key in keys]
                place.plot(
                    NUMBERS, [mean(each) for each in runs], "o-", ms=3, label=rule, color=colours[rule]
                )
                low, high = [min(each) for each in runs], [max(each) for each in runs]
                place.fill_between(NUMBERS, low, high, alpha=0.15, lw=0, color=colours[rule])
            place.set_title(f"{network}: {attack}", fontsize=9)
            place.grid(alpha=0.3)
        row[0].set_ylabel("test accuracy, %")
    for place in axes[-1]:
        place.set_xlabel(f"attackers among {NODES} nodes")
    handles = {
        label: handle
        for row in axes
        for handle, label in zip(*row[0].get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="upper center", ncol=len(handles), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("robust.png"))
    parser.add_argument("--alpha", type=float, default=1.0, help="Of the Dirichlet partition.")
    args = parser.parse_args()
    draw(measured(args.out.with_suffix(".json"), args.alpha), args.out)
