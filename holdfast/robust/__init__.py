"""Messages that cannot be trusted: rules that bound what a few false ones do, and attacks to try them."""

from holdfast.contract.aggregation import AGGREGATIONS, ATTACKS, MEAN, Aggregation, Attack, Mean
from holdfast.robust.attacks import InnerProduct, LabelFlip, LittleIsEnough, SignFlip
from holdfast.robust.rules import ClippedGossip, Krum, Median, NearestNeighbours, TrimmedMean

__all__ = [
    "AGGREGATIONS",
    "ATTACKS",
    "MEAN",
    "Aggregation",
    "Attack",
    "ClippedGossip",
    "InnerProduct",
    "Krum",
    "LabelFlip",
    "LittleIsEnough",
    "Mean",
    "Median",
    "NearestNeighbours",
    "SignFlip",
    "TrimmedMean",
]
