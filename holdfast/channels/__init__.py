"""Channels. Every module of this folder is imported, so a new one need only register its class."""

from importlib import import_module
from pkgutil import iter_modules

from holdfast.channels.bits import BFloat16, Half
from holdfast.channels.chain import Chain, chain
from holdfast.channels.lowrank import LowRank
from holdfast.channels.quantise import Natural, Uniform
from holdfast.channels.sparse import RandomK, TopK
from holdfast.contract.channel import CHANNELS, IDENTITY, Channel, ChosenChannel, Identity

__all__ = [
    "CHANNELS",
    "IDENTITY",
    "BFloat16",
    "Chain",
    "Channel",
    "ChosenChannel",
    "Half",
    "Identity",
    "LowRank",
    "Natural",
    "RandomK",
    "TopK",
    "Uniform",
    "chain",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
