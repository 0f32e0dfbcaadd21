"""Between members: who may connect, what they may ask, and what comes in."""

import os

SUITES = "GRPC_SSL_CIPHER_SUITES"


def _load_grpc() -> None:
    """Imports gRPC so that it speaks TLS 1.3 and nothing older.

    For Python it has no parameter for the lowest version (1.85; grpc/grpc#37305 asks for one), but its list
    of ciphers is that of TLS 1.2 alone. Ours has only ciphers for RSA keys, which no certificate of a
    federation has: what is left is TLS 1.3. gRPC reads the list when it is imported, so the variable is set
    no longer than that: neither this program nor those that it starts see it. Whoever listens tries it on
    itself (``speaks_tls_1_2``).
    """
    before = os.environ.get(SUITES)
    os.environ[SUITES] = "ECDHE-RSA-AES256-GCM-SHA384"
    try:
        import grpc  # noqa: F401
    finally:
        if before is None:
            del os.environ[SUITES]
        else:
            os.environ[SUITES] = before


_load_grpc()
