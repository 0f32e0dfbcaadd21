"""The options that several commands of ``holdfast federation``, ``node`` and ``server`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation file.")]
Name = Annotated[str, typer.Option(help="Who this is, as in the federation file.")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="module:Class",
        help="Your own nn.Module class instead of the file's model; the same source at every site.",
    ),
]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Where state, results and report go; the same again to continue.")
]
Certs = Annotated[
    Path | None,
    typer.Option(
        "--certs", help="Folder with ca.crt, NAME.crt and NAME.key; by default certs/ beside the file."
    ),
]


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= 65535


def _an_address(text: str | None) -> str | None:
    host, _, port = (text or "").rpartition(":")
    if text is not None and not (host and _is_port(port)):
        raise typer.BadParameter(f"expected host:port, such as 0.0.0.0:7001, got {text!r}")
    return text


Listen = Annotated[
    str | None,
    typer.Option(
        callback=_an_address,
        help="host:port to listen on, where it differs from the address in the file.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No certificates and no encryption; on loopback addresses only.")
]
Accept = Annotated[
    str | None,
    typer.Option(metavar="FINGERPRINT", help="Accept the federation file with this fingerprint, for good."),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", help="What this site allows, beside /etc/holdfast/policy.toml."),
]
Log = Annotated[
    Literal["progress", "json"], typer.Option(help="What to show: a progress bar, or structured lines.")
]


def _a_port(text: str | None) -> str | None:
    if text is not None and not _is_port(text.rpartition(":")[2]):
        raise typer.BadParameter(f"expected a port such as 9100, or host:port, got {text!r}")
    return text


Monitor = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        callback=_a_port,
        help="Serve a status page, /health and Prometheus /metrics; on 127.0.0.1 unless HOST says otherwise.",
    ),
]


def _days(days: float) -> float:
    if not 0 < days <= 3650:  # no longer than the authority; also refuses NaN
        raise typer.BadParameter(f"expected more than 0 and at most 3650 days, got {days:g}")
    return days


Days = Annotated[float, typer.Option(callback=_days, help="How long certificates are valid.")]
Asker = Annotated[str | None, typer.Option("--name", help="Whose certificate to show; the first there is.")]
OrderFile = Annotated[Path | None, typer.Option("--output", "-o", help="Where the signed order is written.")]
