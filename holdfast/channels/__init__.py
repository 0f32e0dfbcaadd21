"""Channels. Every module of this folder is imported, so a new one need only register its class."""

from importlib import import_module
from pkgutil import iter_modules

from holdfast.channels.half import Half
from holdfast.contract.channel import CHANNELS, IDENTITY, Channel, ChosenChannel, Identity

__all__ = ["CHANNELS", "IDENTITY", "Channel", "ChosenChannel", "Half", "Identity"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
