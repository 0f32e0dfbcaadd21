"""Local optimisers. Every module of this folder is imported, so a new one need only register its class."""

from importlib import import_module
from pkgutil import iter_modules

from holdfast.contract.local import OPTIMIZERS, LocalOptimizer
from holdfast.optimizers.momentum import Momentum
from holdfast.optimizers.sgd import PLAIN, PlainSGD

__all__ = ["OPTIMIZERS", "PLAIN", "LocalOptimizer", "Momentum", "PlainSGD"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
