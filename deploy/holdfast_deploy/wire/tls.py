"""What gRPC does with TLS but does not tell: asked with Python's own ``ssl``, beside the connection."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from cryptography import x509

from holdfast.core.errors import HoldfastError
from holdfast_deploy.keys import passphrase
from holdfast_deploy.wire.credentials import PEM, Credentials
from holdfast_deploy.wire.proxies import Proxy, open_tunnel

TRIALS: list[int] = []  # the ports at which this process has tried TLS 1.2, one by one
SIGHT = 10.0  # seconds in which the other end has to show a certificate


async def see_certificate(
    host: str, port: int, peer: str, credentials: Credentials, proxy: Proxy | None = None
) -> bytes:
    """The certificate, in PEM, that whoever listens there shows in the name of ``peer``.

    It is checked as gRPC does, which does not tell us. Raises ``ssl.SSLError`` if it will not do.
    """
    assert credentials.folder is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority_of(peer).decode())
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    own, key = (credentials.folder / f"{credentials.name}{ending}" for ending in (".crt", ".key"))
    context.load_cert_chain(own, key, lambda: passphrase(key))
    if proxy is None:
        _, writer = await asyncio.open_connection(host, port)
    else:
        writer = await asyncio.wait_for(open_tunnel(proxy, host, port), SIGHT)
    try:
        await writer.start_tls(context, server_hostname=peer, ssl_handshake_timeout=SIGHT)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(shown).public_bytes(PEM)


async def speaks_tls_1_2(host: str, port: int) -> bool:
    """Whether whoever listens there goes on talking after a greeting in TLS 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    greeting = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), greeting).do_handshake()
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise HoldfastError(f"cannot reach {host}:{port}, where this member listens: {error}") from None
    TRIALS.append(port)
    try:
        writer.write(greeting.read())
        answer = await asyncio.wait_for(reader.read(1), 10.0)
    except OSError:
        return False
    finally:
        writer.close()
    return answer == b"\x16"  # a handshake record; otherwise an alert, or the end
