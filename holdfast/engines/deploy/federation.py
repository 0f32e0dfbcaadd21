"""What the members of a federation agree on, as the engine sees it: plain data, and a method and a network.

The file that describes a federation, and what is built from it, are ``holdfast.experiments.federation``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from pydantic import Field

from holdfast.contract import Method
from holdfast.core.validation import Positive, Section
from holdfast.engines.deploy.own_model import OwnModel
from holdfast.topology import Network

SLOWEST = 2**17  # bytes per second below which a line is too slow for a message

NodeMetric = Literal["local_loss", "test_accuracy", "test_loss"]


class MemberConfig(Section):
    """Somebody who takes part; ``name`` is what the certificate says."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    address: str = Field(default="", pattern=r"^$|^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$")


class LimitsConfig(Section):
    """Each site may have its own."""

    wait: Positive = 3600.0  # seconds that a neighbour is waited for before the node stops, to be resumed
    exchange: Positive = 60.0  # seconds after which a sporadic link counts as inactive
    message_mib: Positive = 8192.0  # the largest message that is accepted

    def patience(self, size: int) -> float:
        """Seconds in which a message of ``size`` bytes has to be here: to be sent, and to travel."""
        return self.wait + size / SLOWEST


class Federation(Protocol):
    """Everything that the members agree on, and where they are."""

    name: str
    rounds: int
    seed: int
    dtype: Literal["float32", "float64"]
    compression: Literal["none", "lossless", "fp16"]
    evaluate_every: int  # rounds between measurements at home
    shared_metrics: list[NodeMetric]  # what of those others may see
    limits: LimitsConfig
    server: MemberConfig | None

    @property
    def id(self) -> str:
        """Identifies the federation: a digest of all that members must agree on, in every message."""

    @property
    def own_model(self) -> OwnModel | None:
        """This site's own model, which replaces the file's; None if the file's is used."""

    @property
    def model_identity(self) -> str:
        """What members compare about the model, beyond the file: their own code's hash, or nothing."""

    @property
    def names(self) -> list[str]:
        """The nodes' names; a node's number is its place."""

    @property
    def node(self) -> Sequence[MemberConfig]:
        """The nodes, in the order of ``names``."""

    @property
    def members(self) -> Sequence[MemberConfig]:
        """All nodes, and the server if there is one."""

    def member(self, name: str) -> MemberConfig:
        """The member called ``name``."""

    @property
    def graph(self) -> Network:
        """Who talks to whom, and with which weights."""

    @property
    def algorithm_name(self) -> str:
        """What the algorithm is called in records and reports."""

    @property
    def method(self) -> Method:
        """The algorithm, its hyperparameters checked."""

    @property
    def cohort(self) -> int:
        """Clients that take part in a round."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type of all vectors."""
