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
    "holdfast.channels": ["Channel", "Half", "Identity"],
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


if TYPE_CHECKING:
    # The same names again: type checkers and editors do not see what is imported on first use.
    # isort: off
    from holdfast.algorithms import (
        DSCAFFOLD as DSCAFFOLD,
        DSGD as DSGD,
        DSGT as DSGT,
        ECL as ECL,
        GECL as GECL,
        GTSGD as GTSGD,
        KGT as KGT,
        NETFLEET as NETFLEET,
        PDMM as PDMM,
        PDSGDM as PDSGDM,
        SCAFFOLD as SCAFFOLD,
        VRLSGD as VRLSGD,
        Algorithm as Algorithm,
        APDAInexact as APDAInexact,
        DSpodFL as DSpodFL,
        DualFL as DualFL,
        FedAvg as FedAvg,
        FedDR as FedDR,
        FedDualAvg as FedDualAvg,
        FedDyn as FedDyn,
        FedLin as FedLin,
        FedPD as FedPD,
        FedProx as FedProx,
        FedSplit as FedSplit,
        FiveGCS as FiveGCS,
        Gossip as Gossip,
        LocalGECL as LocalGECL,
        LocalGECLServer as LocalGECLServer,
        Scaffnew as Scaffnew,
        ServerAlgorithm as ServerAlgorithm,
        constant as constant,
        cosine as cosine,
        halving as halving,
        linear as linear,
    )
    from holdfast.api import (
        History as History,
        MinimizeResult as MinimizeResult,
        TrainResult as TrainResult,
        minimize as minimize,
        train as train,
    )
    from holdfast.channels import (
        Channel as Channel,
        Half as Half,
        Identity as Identity,
    )
    from holdfast.data import (
        IID as IID,
        ClassesPerNode as ClassesPerNode,
        Dataset as Dataset,
        Dirichlet as Dirichlet,
        FederatedData as FederatedData,
        NaturalGroups as NaturalGroups,
        Shards as Shards,
        Unequal as Unequal,
        partition as partition,
    )
    from holdfast.core.errors import (
        HoldfastError as HoldfastError,
    )
    from holdfast.optimizers import (
        LocalOptimizer as LocalOptimizer,
        Momentum as Momentum,
        PlainSGD as PlainSGD,
    )
    from holdfast.problem.reference.curvature import (
        estimate_curvature as estimate_curvature,
    )
    from holdfast.problem.reference.optimum import (
        reference_optimum as reference_optimum,
    )
    from holdfast.solvers import (
        AOGM as AOGM,
        FISTA as FISTA,
        LBFGS as LBFGS,
        SGD as SGD,
        GradientDescent as GradientDescent,
        Newton as Newton,
    )
    from holdfast.topology import (
        BetaChance as BetaChance,
        Network as Network,
        UniformChance as UniformChance,
        complete as complete,
        double_ring as double_ring,
        edge_list as edge_list,
        erdos_renyi as erdos_renyi,
        exponential as exponential,
        hypercube as hypercube,
        line as line,
        random_geometric as random_geometric,
        ring as ring,
        server as server,
        star as star,
        torus as torus,
    )
    # isort: on

else:  # hidden from type checkers, which would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
