"""Every method, one file per method or close family.

Every module of this folder is imported, so a new one need only register its class.
"""

from importlib import import_module
from pkgutil import iter_modules

from holdfast.algorithms.afedpd import AFedPD
from holdfast.algorithms.apda import APDAInexact
from holdfast.algorithms.beer import BEER, MoTEF
from holdfast.algorithms.diffusion import EXTRA, LED, NIDS, ExactDiffusion
from holdfast.algorithms.diloco import DiLoCo, NoLoCo
from holdfast.algorithms.dspodfl import DSpodFL
from holdfast.algorithms.dualfl import DualFL
from holdfast.algorithms.fedavg import FedAvg, FedProx
from holdfast.algorithms.fedcm import FedCM
from holdfast.algorithms.feddr import FedDR, FedSplit
from holdfast.algorithms.feddualavg import FedDualAvg
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.algorithms.fivegcs import FiveGCS
from holdfast.algorithms.gecl import GECL, LocalGECL, LocalGECLServer
from holdfast.algorithms.gossip import DSGD, PDSGDM, QGDSGDM, Gossip
from holdfast.algorithms.pdmm import ECL, PDMM
from holdfast.algorithms.personal import Ditto, FedBN, FedRep
from holdfast.algorithms.scafcom import SCAFCOM, SCALLION
from holdfast.algorithms.scaffnew import DScaffnew, Scaffnew
from holdfast.algorithms.scaffold import DSCAFFOLD, SCAFFOLD
from holdfast.algorithms.tamuna import TAMUNA
from holdfast.algorithms.tracking import DSGT, GTSGD, KGT, NETFLEET, FlexGT
from holdfast.algorithms.vrl import VRLSGD, FedLin
from holdfast.contract import ALGORITHMS, Algorithm, Method, ServerAlgorithm
from holdfast.contract.parameters import constant, cosine, halving, linear

__all__ = [
    "ALGORITHMS",
    "BEER",
    "DSCAFFOLD",
    "DSGD",
    "DSGT",
    "ECL",
    "EXTRA",
    "GECL",
    "GTSGD",
    "KGT",
    "LED",
    "NETFLEET",
    "NIDS",
    "PDMM",
    "PDSGDM",
    "QGDSGDM",
    "SCAFCOM",
    "SCAFFOLD",
    "SCALLION",
    "TAMUNA",
    "VRLSGD",
    "AFedPD",
    "APDAInexact",
    "Algorithm",
    "DScaffnew",
    "DSpodFL",
    "DiLoCo",
    "Ditto",
    "DualFL",
    "ExactDiffusion",
    "FedAvg",
    "FedBN",
    "FedCM",
    "FedDR",
    "FedDualAvg",
    "FedDyn",
    "FedLin",
    "FedPD",
    "FedProx",
    "FedRep",
    "FedSplit",
    "FiveGCS",
    "FlexGT",
    "Gossip",
    "LocalGECL",
    "LocalGECLServer",
    "Method",
    "MoTEF",
    "NoLoCo",
    "Scaffnew",
    "ServerAlgorithm",
    "constant",
    "cosine",
    "halving",
    "linear",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
