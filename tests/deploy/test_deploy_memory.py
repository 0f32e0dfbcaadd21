"""How many models a node holds at once: counted by torch's allocator, not by the clock or the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, describe
from torch.profiler import ProfilerActivity, profile

from holdfast.data.dataset import Dataset
from holdfast_deploy.federation_file import make_federation

INPUTS, CLASSES = 10_000, 40
MODEL = 4 * (INPUTS + 1) * CLASSES  # bytes of a linear model in float32


def few_samples(node: int) -> Dataset:
    x = torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(node))
    y = torch.tensor([0, node + 1])
    return Dataset(x, y, x[:0], y[:0], classes=CLASSES)


def peak(action: Callable[[], object]) -> float:
    """The most that tensors of this thread took at once while ``action`` ran, in models."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    events = seen.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes)) / MODEL


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ({"name": "gossip"}, 4.0),  # x before and after a step, the gradient, and that of a layer
        ({"name": "local-gecl"}, 5.0),  # also the dual, and where the steps began
    ],
)
def test_a_node_holds_few_copies_of_its_model(method: dict[str, object], most: float, tmp_path: Path) -> None:
    raw = describe(
        {**method, "lr": 1e-3, "local_steps": 3},
        nodes=2,
        rounds=2,
        network={"topology": "line"},
        problem={"input_shape": [INPUTS], "classes": CLASSES, "model": "linear", "batch_size": 1},
    )
    run = DeployedRun(make_federation(raw, "test"), tmp_path, data_of=few_samples)

    def of_a() -> None:
        """From reading the model to the finished one on disk."""
        run.members["a"] = run.member("a")
        run.models["a"] = run.members["a"].run()

    run.members["b"] = run.member("b")
    other = threading.Thread(target=run._run, args=["b"])
    other.start()
    held = peak(of_a)
    other.join(PATIENCE)
    for member in run.members.values():
        member.close()
    assert not run.errors
    assert most - 1 < held < most + 0.2  # pieces of messages and a batch come on top
