"""Accuracy against bytes: Local G-ECL on a ring, with and without compression.

python benchmarks/compression.py --data-dir FOLDER [--data mnist] [--model linear] [--device cuda] [--seed 0]

Ring of 10 nodes, Dirichlet 0.1. For each channel it prints the accuracy at the end, the bytes sent, and how
many times fewer bytes it took to come within half a point of the uncompressed run's last accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import holdfast as hf
from holdfast.data import DATASETS

NODES = 10
WITHIN = 0.005  # half a percentage point


class Run(NamedTuple):
    """A channel, and how many times the rounds of the uncompressed run it may take."""

    label: str
    channel: hf.Channel
    times: float = 1.0


def channels(gamma: float | str) -> list[Run]:
    """What is compared: the uncompressed run first; "no feedback" are controls."""
    one = {"gamma": gamma}
    return [
        Run("float32", hf.Identity()),
        Run("sign, 1 bit", hf.Uniform(1, block=1024, **one), 1.3),
        Run("random half, sign", hf.chain(hf.RandomK(0.5), hf.Uniform(1, block=1024), **one), 2),
        Run("top 5 %, no feedback", hf.TopK(0.05, feedback=False), 2),
        Run("top 5 %, 8 bits", hf.chain(hf.TopK(0.05), hf.Uniform(8), **one), 4),
        Run("top 10 %, sign", hf.chain(hf.TopK(0.1), hf.Uniform(1, block=1024), **one), 3),
        Run("natural, 4 bits", hf.Natural(4, **one)),
        Run("half", hf.Half()),
        Run("random 5 %", hf.RandomK(0.05, **one), 4),
        Run("rank 2, bfloat16", hf.chain(hf.LowRank(2, columns=784), hf.BFloat16(), **one), 4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist", choices=["mnist", "fashion-mnist"])
    parser.add_argument("--data-dir", default=None, help="where the files of the data set lie")
    parser.add_argument("--model", default="mlp", choices=["linear", "mlp"])
    parser.add_argument("--rounds", type=int, default=400, help="of the uncompressed run")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--local-steps", type=int, default=5)
    parser.add_argument("--gamma", default="tuned", help='"safe", "tuned" or a number')
    parser.add_argument(
        "--only", nargs="*", help="beginnings of labels; the uncompressed run is always there"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the partition, the model and the minibatches")
    parser.add_argument("--out", type=Path, help="where the figure goes")
    options = parser.parse_args()
    gamma = options.gamma if options.gamma in ("safe", "tuned") else float(options.gamma)

    images = DATASETS.build(options.data, {}, data_dir=options.data_dir)
    data = hf.partition(
        pixels(images.x_train), images.y_train, hf.Dirichlet(0.1), nodes=NODES, seed=options.seed
    )
    test = (pixels(images.x_test), images.y_test)
    chosen = channels(gamma)
    if options.only:
        chosen = chosen[:1] + [run for run in chosen[1:] if run.label.startswith(tuple(options.only))]
    what = f"{options.data}, {options.model}, lr {options.lr}, seed {options.seed}"
    print(f"Local G-ECL, ring of {NODES}, Dirichlet 0.1, {what}")
    print(f"{'channel':<26}{'rounds':>7}{'accuracy':>10}{'MB':>9}{'bits/number':>13}{'fewer bytes':>13}")
    curves: dict[str, Curve] = {}
    for run in chosen:
        torch.manual_seed(options.seed)
        history = hf.train(
            algorithm=hf.LocalGECL(lr=options.lr, local_steps=options.local_steps),
            model=network(options.model),
            data=data,
            topology="ring",
            rounds=round(run.times * options.rounds),
            batch_size=32,
            test=test,
            channel=run.channel,
            evaluate_every=max(1, round(options.rounds / 40)),
            metrics=("test_accuracy",),
            device=options.device,
            seed=options.seed,
        ).history
        curve = Curve(history["round"], history["payload_bytes"], history["test_accuracy"])
        curves[run.label] = curve
        print(row(run.label, curve, curves["float32"]), flush=True)
        if options.out:
            draw(curves, options.out)  # after every run, as a long series may be cut short


class Curve(NamedTuple):
    """What was measured in the course of a run."""

    rounds: list[float]
    payload: list[float]  # bytes sent so far, by all nodes
    accuracy: list[float]  # mean test accuracy of the nodes' models


def pixels(images: torch.Tensor) -> torch.Tensor:
    """From -1 to 1, [N, 784]."""
    return (images.flatten(1).float() / 255 - 0.5) / 0.5


def network(name: str) -> nn.Module:
    """Softmax regression, or one hidden layer of 64."""
    return (
        nn.Linear(784, 10)
        if name == "linear"
        else nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    )


def row(label: str, curve: Curve, plain: Curve) -> str:
    """One line of the table."""
    bits = 32 * curve.payload[-1] / curve.rounds[-1] / (plain.payload[-1] / plain.rounds[-1])
    taken, needed = (bytes_until(plain.accuracy[-1] - WITHIN, of) for of in (curve, plain))
    ratio = "never" if taken is None or needed is None else f"{needed / taken:.1f}"
    figures = f"{curve.rounds[-1]:>7.0f}{curve.accuracy[-1]:>10.4f}{curve.payload[-1] / 1e6:>9.1f}"
    return f"{label:<26}{figures}{bits:>13.2f}{ratio:>13}"


def bytes_until(goal: float, curve: Curve) -> float | None:
    """Sent until the accuracy was ``goal``."""
    reached = (sent for sent, accuracy in zip(curve.payload, curve.accuracy, strict=True) if accuracy >= goal)
    return next(reached, None)


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Accuracy against bytes; controls are dotted."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for label, curve in curves.items():
        control = label.endswith("no feedback")
        megabytes = [payload / 1e6 for payload in curve.payload[1:]]
        style = {"linestyle": ":", "color": "black"} if control else {}
        axes.semilogx(megabytes, curve.accuracy[1:], label=label, **style)
    axes.axhline(curves["float32"].accuracy[-1], color="grey", linewidth=0.8)
    axes.set(xlabel="MB sent by all nodes", ylabel="test accuracy, mean over nodes")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
