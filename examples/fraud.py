"""Five banks recognise fraud together: rare, and different at each bank. Does training together pay?

python examples/fraud.py [--rounds 60]

Every bank is tested on its own payments, with the model it would have trained alone and with the common one.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import holdfast as hf

BANKS = {"Aurora": 1200, "Borealis": 900, "Cirrus": 500, "Delta": 300, "Echo": 150}
LOSS = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 6.0]))  # a missed fraud costs more than a false alarm


def payments(seed: int) -> pd.DataFrame:
    """Made-up payments; customers, and so the inputs, differ from bank to bank."""
    draw = np.random.default_rng(seed)
    parts = []
    for number, (bank, count) in enumerate(BANKS.items()):
        amount, hour = draw.normal(3 + 0.3 * number, 1.0, count), draw.integers(0, 24, count)
        abroad = draw.random(count) < 0.1 + 0.05 * number
        score = 0.8 * amount + 2 * abroad + 1.2 * (hour < 5) - 5.3 + draw.normal(0, 0.7, count)
        columns = {"bank": bank, "amount": amount, "hour": hour / 24, "abroad": abroad * 1.0}
        parts.append(pd.DataFrame(columns | {"fraud": (score > 0).astype(int)}))
    return pd.concat(parts, ignore_index=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))


def train(data: hf.FederatedData | list[tuple[Tensor, Tensor]], rounds: int) -> nn.Module:
    result = hf.train(
        hf.SCAFFOLD(lr=0.1, local_steps=10),
        model=net(),
        data=data,
        loss=LOSS,
        metrics=["train_loss"],
        rounds=rounds,
        progress=False,
    )
    return result.model


@torch.no_grad()
def recall_and_alarms(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The share of frauds that is found, and the share of alarms that are false."""
    alarm, fraud = model(x).argmax(-1) == 1, y == 1
    found, false = (alarm & fraud).sum(), (alarm & ~fraud).sum()
    return float(found / fraud.sum().clamp(min=1)), float(false / alarm.sum().clamp(min=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    data = hf.from_frame(payments(seed=0), target="fraud", node="bank")
    test = hf.from_frame(payments(seed=1), target="fraud", node="bank")
    together = train(data, given.rounds)
    print(f"{'bank':9} {'rows':>5}   found alone, together   false alarms alone, together")
    for number, bank in enumerate(data.names or ()):
        alone = train([data.node(number)], given.rounds)
        figures = [recall_and_alarms(model, *test.node(number)) for model in (alone, together)]
        (found_alone, false_alone), (found, false) = figures
        rows = int(data.counts[number])
        print(f"{bank:9} {rows:5}   {found_alone:11.2f}  {found:8.2f}   {false_alone:18.2f}  {false:8.2f}")


if __name__ == "__main__":
    main()
