"""Federations of real processes against the simulator: models, and bytes as it counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import describe, saved_model, simulate
from member_processes import Members

from holdfast_deploy.federation_file import make_federation

SERVER = {"network": {"topology": "server"}}
LOCAL = {"lr": 0.1, "local_steps": 3}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local-gecl": ({"name": "local-gecl", **LOCAL}, {"nodes": 10}),
    "net-fleet": ({"name": "net-fleet", **LOCAL}, {"nodes": 6}),
    "dspodfl": ({"name": "dspodfl", "lr": 0.1}, {"nodes": 6, "network": {"links": 0.5, "compute": 0.6}}),
    "fedavg": ({"name": "fedavg", **LOCAL}, {"nodes": 2, **SERVER}),
    "scaffold": ({"name": "scaffold", **LOCAL}, {"nodes": 4, "network": {"topology": "server", "cohort": 2}}),
    "fedpd": ({"name": "fedpd", "eta": 1.0, **LOCAL}, {"nodes": 3, **SERVER}),
    "dualfl": (
        {"name": "dualfl", "nu": 0.1, "rho": 0.05, "solver": {"name": "sgd", "lr": 0.1, "steps": 3}},
        {"nodes": 5, **SERVER},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_processes_end_with_the_simulators_models_and_bytes(case: str, tmp_path: Path) -> None:
    algorithm, changes = CASES[case]
    raw = describe(algorithm, rounds=20, **changes)
    with Members(raw, tmp_path / "federation") as members:
        for name in members.names:
            members.start(name)
        members.finish()
        models = torch.stack([saved_model(members.path, name) for name in members.nodes])
        reports = [json.loads(path.read_text()) for path in members.folder.glob("*/report.json")]
    simulation = simulate(make_federation(raw, "test"))
    # A module's state is in alphabetical order: the biases [3] before the weights [3, 6].
    expected = torch.cat([simulation.models[:, 18:], simulation.models[:, :18]], 1)
    assert (models - expected).norm() <= 1e-5 * expected.norm()
    assert len(reports) == len(members.names)
    assert sum(report["payload_bytes"] for report in reports) == simulation.payload_bytes
