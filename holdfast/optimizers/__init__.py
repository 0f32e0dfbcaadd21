"""Local optimisers. Every module of this folder is imported, so a new one need only register its class."""

from importlib import import_module
from pkgutil import iter_modules

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.optimizers.adamw import AdamW
from holdfast.optimizers.clip import Clip
from holdfast.optimizers.fedopt import FedAdagrad, FedAdam, FedYogi
from holdfast.optimizers.momentum import Momentum
from holdfast.optimizers.sgd import PLAIN, SGD
from holdfast.optimizers.warmup import WarmupCosine

__all__ = [
    "OPTIMIZERS",
    "PLAIN",
    "SGD",
    "AdamW",
    "Clip",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "LocalOptimizer",
    "Momentum",
    "WarmupCosine",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
