"""holdfast: federated learning that does not drift.

Names are imported when first used, so that ``import holdfast`` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "holdfast.api": (
        "train compare tune minimize load_result TrainResult Comparison Tuning MinimizeResult History"
    ),
    "holdfast.core.errors": "HoldfastError",
    "holdfast.algorithms": (
        "FedAvg FedProx SCAFFOLD DSCAFFOLD DSGD Gossip GECL LocalGECL LocalGECLServer NETFLEET GTSGD DSGT "
        "KGT PDSGDM VRLSGD FedLin PDMM ECL FedPD FedDyn FedDR FedSplit FedDualAvg Scaffnew APDAInexact "
        "FiveGCS DualFL DSpodFL Ditto FedBN FedRep ExactDiffusion EXTRA NIDS LED QGDSGDM FedCM DiLoCo "
        "NoLoCo DScaffnew FlexGT BEER MoTEF SCALLION SCAFCOM AFedPD TAMUNA"
    ),
    "holdfast.channels": (
        "CHANNELS Channel Half Identity BFloat16 Chain LowRank Natural RandomK TopK Uniform chain"
    ),
    "holdfast.contract": (
        "ALGORITHMS Algorithm ServerAlgorithm Capabilities Oracle Peers Rate Count Whole Positive "
        "NonNegative constant halving cosine linear"
    ),
    "holdfast.engines.common.simulation": "Simulation",
    "holdfast.experiments.setting": "build_problem",
    "holdfast.experiments.callbacks": "Callback EarlyStopping Stop",
    "holdfast.experiments.trackers": "MLflow TensorBoard WandB",
    "holdfast.report.progress": "Progress",
    "holdfast.core.randomness": "random_uniform random_normal",
    "holdfast.data": (
        "DATASETS partition partition_dataset FederatedData Dataset IID Dirichlet Shards ClassesPerNode "
        "NaturalGroups TrainTest Unequal"
    ),
    "holdfast.data.tables": "from_frame",
    "holdfast.data.images": "ImageFolder image_folder image_folders",
    "holdfast.data.per_node": "from_datasets",
    "holdfast.data.hugging_face": "from_partitioner select_columns",
    "holdfast.data.lazy": "LazyData Stream",
    "holdfast.models": "MODELS",
    "holdfast.optimizers": (
        "OPTIMIZERS LocalOptimizer Momentum SGD AdamW Clip WarmupCosine FedAdam FedYogi FedAdagrad"
    ),
    "holdfast.privacy": "DP NodeDP",
    "holdfast.robust": (
        "AGGREGATIONS ATTACKS Aggregation Attack ClippedGossip InnerProduct Krum LabelFlip LittleIsEnough "
        "Median NearestNeighbours SignFlip TrimmedMean"
    ),
    "holdfast.solvers": "AOGM FISTA GradientDescent LBFGS Newton StochasticGradientDescent",
    "holdfast.problem.losses": "LOSSES Loss",
    "holdfast.problem.optimum": "reference_optimum",
    "holdfast.problem.curvature": "estimate_curvature",
    "holdfast.topology": (
        "Network UniformChance BetaChance server ring double_ring complete star line torus hypercube "
        "exponential erdos_renyi random_geometric edge_list base_graph one_peer_exponential equi_static "
        "equi_dynamic"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF]


if TYPE_CHECKING:
    # The same names again: type checkers and editors do not see what is imported on first use.
    # fmt: off
    # isort: off
    from holdfast.algorithms import (
        APDAInexact as APDAInexact, DSCAFFOLD as DSCAFFOLD, DSGD as DSGD, DSGT as DSGT, DSpodFL as DSpodFL,
        Ditto as Ditto, DualFL as DualFL, ECL as ECL, EXTRA as EXTRA, ExactDiffusion as ExactDiffusion,
        LED as LED, NIDS as NIDS, QGDSGDM as QGDSGDM, FedCM as FedCM, DiLoCo as DiLoCo, NoLoCo as NoLoCo,
        DScaffnew as DScaffnew, FedAvg as FedAvg, FedBN as FedBN, FedDR as FedDR,
        FedDualAvg as FedDualAvg, FedDyn as FedDyn, FedLin as FedLin, FedPD as FedPD, FedProx as FedProx,
        FedRep as FedRep, FedSplit as FedSplit, FiveGCS as FiveGCS, GECL as GECL, GTSGD as GTSGD,
        Gossip as Gossip, KGT as KGT, LocalGECL as LocalGECL, LocalGECLServer as LocalGECLServer,
        NETFLEET as NETFLEET, PDMM as PDMM, PDSGDM as PDSGDM, SCAFFOLD as SCAFFOLD, Scaffnew as Scaffnew,
        VRLSGD as VRLSGD, FlexGT as FlexGT, BEER as BEER, MoTEF as MoTEF, SCALLION as SCALLION,
        SCAFCOM as SCAFCOM, AFedPD as AFedPD, TAMUNA as TAMUNA,
    )
    from holdfast.api import (
        Comparison as Comparison, History as History, MinimizeResult as MinimizeResult,
        TrainResult as TrainResult, Tuning as Tuning, compare as compare, load_result as load_result,
        minimize as minimize, train as train, tune as tune,
    )
    from holdfast.channels import (
        BFloat16 as BFloat16, CHANNELS as CHANNELS, Chain as Chain, Channel as Channel, Half as Half,
        Identity as Identity, LowRank as LowRank, Natural as Natural, RandomK as RandomK, TopK as TopK,
        Uniform as Uniform, chain as chain,
    )
    from holdfast.contract import (
        ALGORITHMS as ALGORITHMS, Algorithm as Algorithm, Capabilities as Capabilities, Count as Count,
        NonNegative as NonNegative, Oracle as Oracle, Peers as Peers, Positive as Positive, Rate as Rate,
        ServerAlgorithm as ServerAlgorithm, Whole as Whole, constant as constant, cosine as cosine,
        halving as halving, linear as linear,
    )
    from holdfast.core.errors import HoldfastError as HoldfastError
    from holdfast.core.randomness import random_normal as random_normal, random_uniform as random_uniform
    from holdfast.data import (
        ClassesPerNode as ClassesPerNode, DATASETS as DATASETS, Dataset as Dataset, Dirichlet as Dirichlet,
        FederatedData as FederatedData, IID as IID, NaturalGroups as NaturalGroups, Shards as Shards,
        TrainTest as TrainTest, Unequal as Unequal, partition as partition,
        partition_dataset as partition_dataset,
    )
    from holdfast.data.tables import from_frame as from_frame
    from holdfast.data.images import (
        ImageFolder as ImageFolder, image_folder as image_folder, image_folders as image_folders,
    )
    from holdfast.data.per_node import from_datasets as from_datasets
    from holdfast.data.hugging_face import (
        from_partitioner as from_partitioner, select_columns as select_columns,
    )
    from holdfast.data.lazy import LazyData as LazyData, Stream as Stream
    from holdfast.engines.common.simulation import Simulation as Simulation
    from holdfast.experiments.setting import build_problem as build_problem
    from holdfast.experiments.callbacks import (
        Callback as Callback, EarlyStopping as EarlyStopping, Stop as Stop,
    )
    from holdfast.experiments.trackers import TensorBoard as TensorBoard
    from holdfast.experiments.trackers import MLflow as MLflow, WandB as WandB
    from holdfast.models import MODELS as MODELS
    from holdfast.optimizers import (
        AdamW as AdamW, Clip as Clip, FedAdagrad as FedAdagrad, FedAdam as FedAdam, FedYogi as FedYogi,
        LocalOptimizer as LocalOptimizer, Momentum as Momentum, OPTIMIZERS as OPTIMIZERS,
        SGD as SGD, WarmupCosine as WarmupCosine,
    )
    from holdfast.privacy import DP as DP, NodeDP as NodeDP
    from holdfast.problem.losses import LOSSES as LOSSES, Loss as Loss
    from holdfast.problem.curvature import estimate_curvature as estimate_curvature
    from holdfast.problem.optimum import reference_optimum as reference_optimum
    from holdfast.report.progress import Progress as Progress
    from holdfast.robust import (
        AGGREGATIONS as AGGREGATIONS, ATTACKS as ATTACKS, Aggregation as Aggregation, Attack as Attack,
        ClippedGossip as ClippedGossip, InnerProduct as InnerProduct, Krum as Krum, LabelFlip as LabelFlip,
        LittleIsEnough as LittleIsEnough, Median as Median, NearestNeighbours as NearestNeighbours,
        SignFlip as SignFlip, TrimmedMean as TrimmedMean,
    )
    from holdfast.solvers import (
        AOGM as AOGM, FISTA as FISTA, GradientDescent as GradientDescent, LBFGS as LBFGS, Newton as Newton,
        StochasticGradientDescent as StochasticGradientDescent,
    )
    from holdfast.topology import (
        BetaChance as BetaChance, Network as Network, UniformChance as UniformChance,
        base_graph as base_graph, complete as complete, double_ring as double_ring, edge_list as edge_list,
        equi_dynamic as equi_dynamic, equi_static as equi_static, erdos_renyi as erdos_renyi,
        exponential as exponential, hypercube as hypercube, line as line,
        one_peer_exponential as one_peer_exponential,
        random_geometric as random_geometric, ring as ring, server as server, star as star, torus as torus,
    )
    # isort: on
    # fmt: on

else:  # hidden from type checkers, which would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            # With these two, Python adds the nearest name to what it prints.
            raise AttributeError(
                f"module 'holdfast' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            )
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
