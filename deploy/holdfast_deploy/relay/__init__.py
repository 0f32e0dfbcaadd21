"""Members that can only dial out: a relay passes sealed frames between them and cannot read them."""

import holdfast_deploy.wire  # noqa: F401 - before gRPC, which it configures
