"""Problems that the mathematical tests share, and runs for tests of reports."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from sample_run import troubled_sweep, two_algorithms
from torch import Tensor

from holdfast.api import as_network
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.record import RunRecord, load_record
from holdfast_papers.dualfl import quadratics as quadratics_of_dualfl

# so that an assert in these shows its values, as in a test
pytest.register_assert_rewrite("fuzzed_federation", "report_page", "server_runs")


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: garbage collection need not look at it each time."""
    gc.collect()
    gc.freeze()


class Quadratics(quadratics_of_dualfl.Quadratics):
    """Quadratics with each node's own function, and runs of any method on any network."""

    @property
    def functions(self) -> list:
        return [lambda x, A=A, b=b: 0.5 * (x - b) @ A @ (x - b) for A, b in zip(self.A, self.b, strict=True)]

    def grads(self, x: Tensor) -> Tensor:
        """[n, d]: every node's gradient at its own row of ``x``."""
        return self.full_grads(x, torch.arange(self.nodes))

    def run(self, algorithm, rounds: int, topology=None, cohort="all") -> Tensor:
        """[rounds + 1, n, d]: every node's model after every round."""
        network = as_network(topology, self.nodes)
        simulation = Simulation(algorithm, self, network, seed=3, cohort=cohort)
        path = [simulation.models.clone()]
        for _ in range(rounds):
            simulation.step()
            path.append(simulation.models.clone())
        return torch.stack(path)


def make_quadratics(
    nodes: int = 10, dim: int = 4, mu: float = 0.5, L: float = 5.0, seed: int = 1
) -> Quadratics:
    rng = np.random.default_rng(seed)
    matrices, minimisers = [], []
    for _ in range(nodes):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        eigenvalues = np.exp(rng.uniform(np.log(mu), np.log(L), dim))
        eigenvalues[0], eigenvalues[-1] = mu, L
        matrices.append(basis @ np.diag(eigenvalues) @ basis.T)
        minimisers.append(3 * rng.standard_normal(dim))
    return Quadratics(torch.tensor(np.array(matrices)), torch.tensor(np.array(minimisers)))


@pytest.fixture(scope="session", autouse=True)
def notes_of_this_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a user has accepted is noted in a folder of the tests' own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def quadratics() -> Quadratics:
    return make_quadratics()


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return load_record(two_algorithms(tmp_path_factory.mktemp("runs") / "good"))


@pytest.fixture(scope="session")
def troubled_run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return load_record(troubled_sweep(tmp_path_factory.mktemp("runs") / "troubled"))


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A made-up paper among the others, in a folder of its own."""
    from tiny_paper import tiny_paper

    from holdfast_papers.catalogue import PAPERS

    (tmp_path / "package").mkdir()
    tiny = tiny_paper(tmp_path / "package")
    monkeypatch.setitem(PAPERS, "tiny", tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    return tiny
