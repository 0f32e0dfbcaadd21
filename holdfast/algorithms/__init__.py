"""Every method, one file per method or close family; ``base`` holds the contract."""

from holdfast.algorithms.base import ALGORITHMS, Algorithm, Method, ServerAlgorithm
from holdfast.algorithms.fedavg import FedAvg, FedProx
from holdfast.algorithms.gecl import GECL, LocalGECL, LocalGECLServer
from holdfast.algorithms.gossip import DSGD, Gossip
from holdfast.algorithms.momentum import PDSGDM
from holdfast.algorithms.scaffold import DSCAFFOLD, SCAFFOLD
from holdfast.algorithms.schedules import constant, cosine, halving
from holdfast.algorithms.tracking import DSGT, GTSGD, KGT, NETFLEET
from holdfast.algorithms.vrl import VRLSGD, FedLin

__all__ = [
    "ALGORITHMS",
    "DSCAFFOLD",
    "DSGD",
    "DSGT",
    "GECL",
    "GTSGD",
    "KGT",
    "NETFLEET",
    "PDSGDM",
    "SCAFFOLD",
    "VRLSGD",
    "Algorithm",
    "FedAvg",
    "FedLin",
    "FedProx",
    "Gossip",
    "LocalGECL",
    "LocalGECLServer",
    "Method",
    "ServerAlgorithm",
    "constant",
    "cosine",
    "halving",
]
