"""The same algorithms between real machines: one node next to its own data, messages over gRPC and TLS."""

import os

# gRPC has no switch for the lowest version of TLS, but its list of ciphers is that of TLS 1.2 alone. Ours has
# only ciphers for RSA keys, which no certificate of a federation has: what is left is TLS 1.3.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384"
