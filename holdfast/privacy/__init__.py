"""Differential privacy: what was promised, what every access to the data costs, and the noise in between."""

from holdfast.privacy.budget import DP, Budget, NodeDP
from holdfast.privacy.ledger import Ledger, protection

__all__ = ["DP", "Budget", "Ledger", "NodeDP", "protection"]
