"""What server and clients have in common: model, methods, and which client has which data."""

from __future__ import annotations

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import holdfast as hf

METHODS = {
    "scaffold": hf.SCAFFOLD(lr=0.1, local_steps=8),
    "feddyn": hf.FedDyn(lr=0.1, local_steps=8, alpha=0.1),
    "fedpd": hf.FedPD(eta=1.0, lr=0.1, local_steps=8),
    "dualfl": hf.DualFL(nu=0.1, rho=0.02, solver=hf.LBFGS()),
}
OPTIONS = {"batch_size": 32, "l2": 0.1}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 10, dtype=torch.float64)


@lru_cache(1)
def federated(nodes: int) -> hf.FederatedData:
    """Handwritten digits; every node has seen mostly a few of the ten."""
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x / 16, dtype=torch.float64)
    return hf.partition(x, torch.tensor(y), hf.Dirichlet(0.1), nodes=nodes, seed=0)


def samples(node: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Those of one node; a site of your own would read its own file here."""
    return federated(nodes).node(node)
