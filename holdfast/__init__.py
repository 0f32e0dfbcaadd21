"""holdfast: federated learning that does not drift.

Names are imported when first used, so that ``import holdfast`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "holdfast.api": ["train", "minimize", "TrainResult", "MinimizeResult", "History"],
    "holdfast.core.errors": ["HoldfastError"],
    "holdfast.algorithms": [
        "Algorithm",
        "ServerAlgorithm",
        "FedAvg",
        "FedProx",
        "SCAFFOLD",
        "DSCAFFOLD",
        "DSGD",
        "Gossip",
        "GECL",
        "LocalGECL",
        "LocalGECLServer",
        "NETFLEET",
        "GTSGD",
        "DSGT",
        "KGT",
        "PDSGDM",
        "VRLSGD",
        "FedLin",
        "PDMM",
        "ECL",
        "FedPD",
        "FedDyn",
        "FedDR",
        "FedSplit",
        "FedDualAvg",
        "Scaffnew",
        "APDAInexact",
        "FiveGCS",
        "DualFL",
        "DSpodFL",
        "constant",
        "halving",
        "cosine",
        "linear",
    ],
    "holdfast.data": [
        "partition",
        "FederatedData",
        "Dataset",
        "IID",
        "Dirichlet",
        "Shards",
        "ClassesPerNode",
        "NaturalGroups",
        "Unequal",
    ],
    "holdfast.optimizers": ["LocalOptimizer", "Momentum", "PlainSGD"],
    "holdfast.solvers": ["AOGM", "FISTA", "GradientDescent", "LBFGS", "Newton", "SGD"],
    "holdfast.problem.reference.optimum": ["reference_optimum"],
    "holdfast.problem.reference.curvature": ["estimate_curvature"],
    "holdfast.topology": [
        "Network",
        "UniformChance",
        "BetaChance",
        "server",
        "ring",
        "double_ring",
        "complete",
        "star",
        "line",
        "torus",
        "hypercube",
        "exponential",
        "erdos_renyi",
        "random_geometric",
        "edge_list",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from holdfast.algorithms import *  # noqa: F403
    from holdfast.api import *  # noqa: F403
    from holdfast.core.errors import HoldfastError as HoldfastError
    from holdfast.data import *  # noqa: F403
    from holdfast.optimizers import *  # noqa: F403
    from holdfast.topology import *  # noqa: F403
