"""Differential privacy: budgets, the cost of every access to the data, and noised messages."""

from holdfast.privacy.budget import DP, Budget, NodeDP
from holdfast.privacy.ledger import Ledger, protection

__all__ = ["DP", "Budget", "Ledger", "NodeDP", "protection"]
