"""Every method, one file per method or close family; ``base`` holds the contract."""

from holdfast.algorithms.base import ALGORITHMS, Algorithm, Method, ServerAlgorithm
from holdfast.algorithms.fedavg import FedAvg, FedProx
from holdfast.algorithms.gecl import GECL, LocalGECL, LocalGECLServer
from holdfast.algorithms.gossip import DSGD, Gossip
from holdfast.algorithms.scaffold import DSCAFFOLD, SCAFFOLD
from holdfast.algorithms.schedules import constant, cosine, halving

__all__ = [
    "ALGORITHMS",
    "DSCAFFOLD",
    "DSGD",
    "GECL",
    "SCAFFOLD",
    "Algorithm",
    "FedAvg",
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
