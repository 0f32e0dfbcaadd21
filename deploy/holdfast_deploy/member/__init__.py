"""A process of a federation: a node next to its data, or a server."""

import holdfast_deploy.wire  # noqa: F401 - before gRPC, which it configures
