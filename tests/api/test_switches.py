"""What training sets for the whole process is put back: torch belongs to the user."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from command_line import experiment_file, holdfast, make_plan
from torch import nn

import holdfast as hf
from holdfast.experiments.runner import Runner


def number_of_threads() -> int:
    """As a new thread of the user's has it."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def switches() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
        number_of_threads(),
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


@pytest.fixture(params=["highest", "medium"])
def before(request):
    """The switches, as a user has set them."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    torch.set_float32_matmul_precision(request.param)
    torch.backends.cudnn.allow_tf32 = request.param == "medium"
    torch.set_num_threads(2)
    yield switches()
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]
    torch.set_num_threads(kept[2])


as_set = pytest.mark.parametrize("before", ["medium"], indirect=True)


def images() -> hf.FederatedData:
    x = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return hf.partition(x, torch.arange(24) % 2, hf.IID(), nodes=4, seed=0)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2))


@pytest.mark.parametrize("precision", ["tf32", "float32", "bfloat16"])
def test_training_leaves_the_switches_alone(precision, before) -> None:
    model = convolutional()
    before = switches()
    hf.train(hf.FedAvg(lr=0.1), model=model, data=images(), rounds=2, precision=precision)
    assert switches() == before


def test_a_failure_leaves_them_alone_too(before) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 2))  # should have 64 inputs
    before = switches()
    with pytest.raises(hf.HoldfastError, match="fails on a batch"):
        hf.train(hf.FedAvg(lr=0.1), model=model, data=images(), rounds=2)
    assert switches() == before


def test_minimising_leaves_them_alone(before) -> None:
    hf.minimize([lambda x: (x**2).sum()], [1.0], hf.FedAvg(lr=0.1), rounds=2)
    assert switches() == before


@as_set
def test_a_run_leaves_them_alone(before, tmp_path) -> None:
    plan = make_plan(tmp_path)
    torch.set_float32_matmul_precision("medium")
    before = switches()
    Runner.start(plan, tmp_path / "runs").execute()
    assert switches() == before


@as_set
def test_the_command_leaves_them_alone(before, tmp_path) -> None:
    outcome = holdfast("run", experiment_file(tmp_path), "rounds=1", "-q", "--runs-dir", tmp_path / "runs")
    assert outcome.code == 0, outcome.err
    assert switches() == before


def test_warnings_point_to_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.minimize([lambda x: (x**4).sum()], [9.0], hf.FedAvg(lr=10.0), rounds=9)
    [warning] = [one for one in caught if "diverged" in str(one.message)]
    assert warning.filename == __file__
