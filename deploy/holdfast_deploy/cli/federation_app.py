"""``holdfast federation``: how it is set up and rehearsed. Only options, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast_deploy.cli.federation_options import (
    Certs,
    Days,
    File,
    Model,
    Name,
    PolicyFile,
    deploying,
)
from holdfast_deploy.cli.federation_running import running

federation = typer.Typer(
    help="Train together with other organisations: set up, rehearse and watch a federation.",
    no_args_is_help=True,
)


@federation.command("new")
@deploying
def new(
    nodes: Annotated[
        str, typer.Option(help="Who takes part, such as a=host1:7001,b=host2:7001,c=host3:7001.")
    ],
    algorithm: Annotated[str, typer.Option(help="The method; 'holdfast list algorithms' shows them.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key.path=value", help="The rest, such as algorithm.lr=0.1 problem.model=mlp."
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="ring, complete ...; with --server it is a server.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="A server for central methods, such as hub=host0:7000.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 100,
    data: Annotated[
        Path | None,
        typer.Option(help="An npz file whose samples look like everybody's, to read shapes from."),
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 64 or 1,28,28, instead of --data.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes over all nodes; none for real targets.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "federation.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write a federation file, which all members then share."""
    from holdfast_deploy.cli.federation import new_federation

    new_federation(
        nodes=nodes,
        algorithm=algorithm,
        overrides=overrides or [],
        topology=topology,
        server=server,
        rounds=rounds,
        data=data,
        input_shape=input_shape,
        classes=classes,
        output=output,
        force=force,
    )


@federation.command("certs")
@deploying
def certs(file: File, folder: Certs = None, days: Days = 365) -> None:
    """Make a private authority, and a key and a certificate for every member, in certs/ beside the file."""
    from holdfast_deploy.cli.federation import make_all_certificates

    make_all_certificates(file, folder, days)


@federation.command("csr")
@deploying
def csr(
    file: File,
    name: Name,
    folder: Certs = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Protect the key by a passphrase, which is asked for.")
    ] = False,
) -> None:
    """Make your own key, which stays with you, and a request to be signed."""
    from holdfast_deploy.cli.federation import request_certificate

    request_certificate(file, name, folder, encrypt=encrypt)


@federation.command("sign")
@deploying
def sign(
    file: File,
    requests: Annotated[
        list[Path] | None, typer.Argument(metavar="NAME.csr", help="Requests of members.")
    ] = None,
    folder: Certs = None,
    days: Days = 365,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Sign for a name though another key has a certificate for it."),
    ] = False,
) -> None:
    """Sign the federation file, and members' requests with the authority's key; makes that if need be."""
    from holdfast_deploy.cli.federation import sign_requests

    sign_requests(file, requests or [], folder, days, replace=replace)


@federation.command("revoke")
@deploying
def revoke(
    file: File,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose certificate holds no longer.")],
    serial: Annotated[
        str | None, typer.Option(help="Which one, by its serial number; by default certs/NAME.crt.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the others.")] = "",
    folder: Certs = None,
) -> None:
    """Revoke a member's certificate: add it to the signed list certs/revoked.json, to be sent to all."""
    from holdfast_deploy.cli.federation import revoke_certificate

    revoke_certificate(file, name, serial, reason, folder)


@federation.command("show")
@deploying
def show(
    file: File,
    name: Annotated[str | None, typer.Option(help="Who you are, as in the federation file.")] = None,
    model: Model = None,
    certs: Certs = None,
    policy: PolicyFile = None,
) -> None:
    """What the federation will do at your site: what runs, what leaves, who gets it, for how long."""
    from holdfast_deploy.cli.consent import show_federation

    show_federation(file, name, model, certs, policy)


@federation.command("accept")
@deploying
def accept(
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="As 'federation show' and the coordinator tell it.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation file.")] = Path(
        "federation.toml"
    ),
) -> None:
    """Accept a federation file that you have read; a changed one has to be accepted again."""
    from holdfast_deploy.cli.consent import accept_federation

    accept_federation(file, fingerprint)


@federation.command("try")
@deploying
def try_(
    file: File,
    data: Annotated[
        str | None,
        typer.Option(
            help="An npz file, or the name of a data set, to split over the nodes; or module:function, which "
            "gives each node its own. By default random numbers."
        ),
    ] = None,
    model: Model = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where all members keep their files.")] = Path(
        "rehearsal"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what is in that folder first.")] = False,
    lose: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Kill this node after a third of the rounds: do the others go on?"),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Have the coordinator remove this node after a third of them."),
    ] = None,
    relay: Annotated[
        bool,
        typer.Option("--relay", help="Nobody has a port: all talk through a relay, as behind firewalls."),
    ] = False,
) -> None:
    """Rehearse: the whole federation as processes on this machine, with certificates and all."""
    from holdfast_deploy.cli.rehearsal import Trial, rehearse

    rehearse(file, data, model, folder, fresh=fresh, trial=Trial(lose, remove, relay))


federation.add_typer(running)
