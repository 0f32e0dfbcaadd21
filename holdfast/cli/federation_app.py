"""``holdfast federation``, ``node`` and ``server``: only their options, so that help is quick."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

federation = typer.Typer(
    help="Train together with other organisations: set up, rehearse and watch a federation.",
    no_args_is_help=True,
)

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
    Path | None, typer.Option("--dir", help="Where state, results and report go; the same again to go on.")
]
Certs = Annotated[
    Path | None,
    typer.Option(
        "--certs", help="Folder with ca.crt, NAME.crt and NAME.key; by default certs/ beside the file."
    ),
]
Listen = Annotated[
    str | None, typer.Option(help="host:port to listen on, where it differs from the address in the file.")
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
    if text is not None and not text.rpartition(":")[2].isdigit():
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


def node(
    file: File,
    name: Name,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.npz|module:function",
            help="Your npz file: x_train, y_train and, if any, x_test, y_test. Or your own function.",
        ),
    ],
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or cuda:N.")] = "cpu",
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Take part in a federation, next to your own data; they never leave this machine.

    Ctrl-C, a crash or a power cut lose nothing: the same command goes on where it stopped.
    """
    _require_extra()
    from holdfast.cli.node import MemberOptions, run_node

    options = MemberOptions(file, name, model, folder, certs, listen, insecure, log, monitor, accept, policy)
    run_node(options, data, device)


def server(
    file: File,
    name: Name,
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Serve a federation with a central method; the server has no data."""
    _require_extra()
    from holdfast.cli.node import MemberOptions, run_server

    run_server(
        MemberOptions(file, name, model, folder, certs, listen, insecure, log, monitor, accept, policy)
    )


@federation.command("new")
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
    _require_extra()
    from holdfast.cli.federation import new_federation

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


Days = Annotated[float, typer.Option(help="How long certificates are valid.")]


@federation.command("certs")
def certs(file: File, folder: Certs = None, days: Days = 365) -> None:
    """Make a private authority, and a key and a certificate for every member, in certs/ beside the file."""
    _require_extra()
    from holdfast.cli.federation import make_all_certificates

    make_all_certificates(file, folder, days)


@federation.command("csr")
def csr(
    file: File,
    name: Name,
    folder: Certs = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Protect the key by a passphrase, which is asked for.")
    ] = False,
) -> None:
    """Make your own key, which stays with you, and a request to be signed."""
    _require_extra()
    from holdfast.cli.federation import request_certificate

    request_certificate(file, name, folder, encrypt=encrypt)


@federation.command("sign")
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
    _require_extra()
    from holdfast.cli.federation import sign_requests

    sign_requests(file, requests or [], folder, days, replace=replace)


@federation.command("revoke")
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
    _require_extra()
    from holdfast.cli.federation import revoke_certificate

    revoke_certificate(file, name, serial, reason, folder)


@federation.command("show")
def show(
    file: File,
    name: Annotated[str | None, typer.Option(help="Who you are, as in the federation file.")] = None,
    model: Model = None,
    certs: Certs = None,
    policy: PolicyFile = None,
) -> None:
    """What the federation will do at your site: what runs, what leaves, who gets it, for how long."""
    _require_extra()
    from holdfast.cli.consent import show_federation

    show_federation(file, name, model, certs, policy)


@federation.command("accept")
def accept(
    fingerprint: Annotated[
        str, typer.Argument(metavar="FINGERPRINT", help="As 'federation show' and the coordinator tell it.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation file.")] = Path(
        "federation.toml"
    ),
) -> None:
    """Accept a federation file that you have read; a changed one has to be accepted again."""
    _require_extra()
    from holdfast.cli.consent import accept_federation

    accept_federation(file, fingerprint)


Asker = Annotated[str | None, typer.Option("--name", help="Whose certificate to show; the first there is.")]
OrderFile = Annotated[Path | None, typer.Option("--output", "-o", help="Where the signed order is written.")]
Who = Annotated[str, typer.Argument(metavar="NAME", help="The member.")]
WhoWhere = Annotated[
    str,
    typer.Argument(metavar="NAME[=host:port]", help="The member, and where it is reached, if that is new."),
]
Samples = Annotated[int | None, typer.Option(help="How many samples it has, where the file says so.")]


@federation.command("remove")
def remove(
    file: File,
    member: Who,
    name: Asker = None,
    certs: Certs = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation go on without a member; only its coordinator can."""
    _change("remove", file, member, name, certs, None, output, insecure)


@federation.command("add")
def add(
    file: File,
    member: WhoWhere,
    name: Asker = None,
    certs: Certs = None,
    samples: Samples = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation take in a member, also one that was lost and is back."""
    _change("add", file, member, name, certs, samples, output, insecure)


@federation.command("replace")
def replace(
    file: File,
    member: WhoWhere,
    name: Asker = None,
    certs: Certs = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a member go on with an empty folder, on another machine for instance."""
    _change("replace", file, member, name, certs, None, output, insecure)


def _change(
    change: Literal["remove", "add", "replace"],
    file: Path,
    member: str,
    name: str | None,
    certs: Path | None,
    samples: int | None,
    output: Path | None,
    insecure: bool,
) -> None:
    _require_extra()
    from holdfast.cli.membership import change_members

    change_members(
        file, change, member, asker=name, certs=certs, samples=samples, output=output, insecure=insecure
    )


@federation.command("model")
def model(
    file: File,
    name: Name,
    model: Model = None,
    folder: Folder = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; NAME.safetensors by default.")
    ] = None,
) -> None:
    """Write a member's current model as safetensors, at any time, also while it runs."""
    _require_extra()
    from holdfast.cli.recovery import write_current_model

    write_current_model(file, name, model, folder, output)


@federation.command("rollback")
def rollback(
    file: File,
    name: Name,
    to: Annotated[int, typer.Option(help="The last round to keep; the same for every member.")],
    folder: Folder = None,
) -> None:
    """Put a stopped member back to the end of an earlier round, before it went wrong."""
    _require_extra()
    from holdfast.cli.recovery import roll_member_back

    roll_member_back(file, name, to, folder)


@federation.command("relay")
def relay(file: File, certs: Certs = None, listen: Listen = None) -> None:
    """Pass on what members cannot tell one another directly; the relay cannot read it."""
    _require_extra()
    from holdfast.cli.relay import run_relay

    run_relay(file, certs, listen)


@federation.command("status")
def status(
    file: File,
    name: Annotated[
        str | None, typer.Option(help="Whose certificate to show; the only one there is.")
    ] = None,
    certs: Certs = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Who is up, at which round, how far behind, bytes sent, last error."""
    _require_extra()
    from holdfast.cli.federation import show_status

    show_status(file, name, certs, insecure=insecure, as_json=json)


@federation.command("audit")
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A member's folder, such as node-alpha.")],
    against: Annotated[
        list[Path] | None, typer.Option(help="Other members' folders: what they saw of this log.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines as they are, for programs.")] = False,
) -> None:
    """Check a member's audit log, and print it: who was given what, who gave what, and when."""
    _require_extra()
    from holdfast.cli.audit import show_audit

    show_audit(folder, against or [], as_json=json)


@federation.command("try")
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
) -> None:
    """Rehearse: the whole federation as processes on this machine, with certificates and all."""
    _require_extra()
    from holdfast.cli.rehearsal import rehearse

    rehearse(file, data, model, folder, fresh=fresh, lose=lose)


def _require_extra() -> None:
    from holdfast.core.errors import HoldfastError

    for module in ("grpc", "cryptography", "prometheus_client"):
        if find_spec(module) is None:
            raise HoldfastError(f"{module} is not installed: pip install 'holdfast[deploy]'")
