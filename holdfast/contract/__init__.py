"""The whole contract between an algorithm and the engine that runs it.

An algorithm is a frozen dataclass of hyperparameters with a few pure functions on tensors ``[..., d]``: the
simulator calls them with all nodes stacked ``[n, d]``, a cluster rank with its block of rows, a deployed node
with its own row. What a node can do is spelled out by two objects it is handed: its ``Oracle`` (its own
objective) and its ``Peers`` (its links). Communication is a call in the middle of ``round``, so that a round
reads like the paper's and may exchange once, twice or not at all.

There are two kinds. An ``Algorithm`` has no leader: nodes exchange with their neighbours, or, when the
network is a server, with the average of all nodes. A ``ServerAlgorithm`` keeps state on the server and may
run with a sampled cohort of clients.
"""

from holdfast.contract.channel import CHANNELS, EVERY_USE, IDENTITY, Channel, ChosenChannel, Compensated, Draw
from holdfast.contract.method import ALGORITHMS, Algorithm, Capabilities, Method, ServerAlgorithm, State
from holdfast.contract.node import Edges, Inbox, Oracle, Peers
from holdfast.contract.optimizer import OPTIMIZERS, Gradient, LocalOptimizer, Memory, Optimizer
from holdfast.contract.parameters import (
    SCHEDULES,
    LocalSteps,
    ModelPart,
    Part,
    Rate,
    Steps,
    constant,
    cosine,
    found_part,
    halving,
    linear,
    most_steps,
)
from holdfast.contract.solver import SOLVERS, LocalProblem, LocalSolver, Solver
from holdfast.core.validation import Count, NonNegative, Positive, Whole

__all__ = [
    "ALGORITHMS",
    "CHANNELS",
    "EVERY_USE",
    "IDENTITY",
    "OPTIMIZERS",
    "SCHEDULES",
    "SOLVERS",
    "Algorithm",
    "Capabilities",
    "Channel",
    "ChosenChannel",
    "Compensated",
    "Count",
    "Draw",
    "Edges",
    "Gradient",
    "Inbox",
    "LocalOptimizer",
    "LocalProblem",
    "LocalSolver",
    "LocalSteps",
    "Memory",
    "Method",
    "ModelPart",
    "NonNegative",
    "Optimizer",
    "Oracle",
    "Part",
    "Peers",
    "Positive",
    "Rate",
    "ServerAlgorithm",
    "Solver",
    "State",
    "Steps",
    "Whole",
    "constant",
    "cosine",
    "found_part",
    "halving",
    "linear",
    "most_steps",
]
