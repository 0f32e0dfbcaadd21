"""A step that is small runs on one core; torch has its threads back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.problem import problem as threads


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Seen(hf.Callback):
    """How rounds are run, and with how many threads."""

    def __init__(self) -> None:
        self.how, self.threads = "", set[int]()

    def on_prepared(self, job: object, how: str) -> None:
        self.how = how


def train(seen: Seen, model: nn.Module) -> None:
    data = [(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)) for _ in range(4)]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.threads.add(torch.get_num_threads())
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    method = hf.FedAvg(lr=0.1)
    options = {"rounds": 1, "batch_size": 8, "metrics": ["minibatch_loss"], "progress": False}
    hf.train(method, model=model, data=data, loss=loss, callbacks=[seen], **options)


@pytest.mark.parametrize(("worth", "used"), [(threads.WORTH_A_THREAD, 1), (4 * 8 * 8 // 2, 2), (1, 4)])
def test_a_step_has_as_many_threads_as_it_is_worth(
    worth: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four nodes, eight samples each, a model of eight parameters: 256 multiply-adds."""
    monkeypatch.setattr(threads, "WORTH_A_THREAD", worth)
    seen = Seen()
    train(seen, nn.Linear(3, 2))
    assert used in seen.threads
    assert (f"on {used} of 4 cores" in seen.how) == (used < 4)
    assert torch.get_num_threads() == 4


def test_nodes_that_are_computed_one_by_one_are_spread_over_all_cores() -> None:
    seen = Seen()
    train(seen, nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten()))
    assert "nodes one by one on 4 cores" in seen.how
    assert "small" not in seen.how
    assert torch.get_num_threads() == 4
