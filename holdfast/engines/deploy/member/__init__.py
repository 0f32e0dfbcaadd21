"""A process of a federation: a node next to its data, or a server."""

from holdfast.engines.deploy.storage.digests import data_digest

__all__ = ["data_digest"]
