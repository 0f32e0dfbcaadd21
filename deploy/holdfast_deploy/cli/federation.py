"""``holdfast federation new``, ``certs``, ``csr``, ``sign`` and ``revoke``: how a federation is set up."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.core.errors import HoldfastError, unknown
from holdfast_deploy.cli.options import Certs, Days, File, Name

if TYPE_CHECKING:
    from holdfast_deploy.federation_file import FederationFile

COMMENTS = {
    "name =": "All members use the same copy of this file; only [limits] and addresses may differ.",
    "[problem]": "What is learned. Samples enter as (x - mean)/std, uint8 pixels as (x/255 - mean)/std.",
    "[network]": "Who talks to whom.",
    "[algorithm]": "'holdfast list algorithms' shows all methods and their parameters.",
    "coordinator =": "Whose signature holds for all members: the public half of certs/coordinator.key.",
    "evaluate_every =": "Rounds between local measurements. Others may see what shared_metrics lists:\n"
    "# local_loss, test_accuracy, test_loss.",
    "[limits]": "Seconds to wait for a neighbour, and for a sporadic link; the largest message in MiB.",
    "[server]": "The only one that has to be reachable.",
    "[[node]]": "The members. Certificates carry their names.",
}


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
        typer.Option(help="An npz file whose samples look like all members', to read shapes from."),
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
    import tomli_w

    from holdfast.core.files import private_files, write_atomic
    from holdfast.experiments.spec import apply_override
    from holdfast_deploy.consent import accept, shown, sign_federation, signature_path
    from holdfast_deploy.federation_file import make_federation
    from holdfast_deploy.keys import KEY_NAME, make_key, public_key

    if output.exists() and not force:
        raise HoldfastError(f"{output} exists already; choose another name, or overwrite it with --force")
    raw: dict[str, Any] = {
        "name": "federation",
        "rounds": rounds,
        "seed": 0,
        "dtype": "float32",
        "compression": "none",
        "evaluate_every": 1,
        "shared_metrics": [],
        "problem": _problem(data, input_shape, classes),
        "network": {"topology": topology or ("server" if server else "ring")},
        "algorithm": {"name": algorithm},
        "limits": {"wait": 3600.0, "exchange": 60.0, "message_mib": 8192.0},
    }
    if server:
        raw["server"] = _member(server)
    raw["node"] = [_member(text) for text in nodes.split(",")]
    for override in overrides or []:
        apply_override(raw, override)
        if isinstance(raw["algorithm"], list):
            raw["algorithm"] = raw["algorithm"][0]
    make_federation(raw, str(output))  # complains before anything is written
    certs = output.parent / "certs"
    with private_files():
        raw = {"name": raw.pop("name"), "coordinator": public_key(make_key(certs)), **raw}
    federation = make_federation(raw, str(output))
    write_atomic(output, _commented(tomli_w.dumps(raw)).encode())
    sign_federation(output, federation, certs)
    with suppress(OSError):  # no home to note it in
        accept(federation, output)
    print(f"wrote {output}: {len(federation.node)} nodes, fingerprint {shown(federation.id)}")
    print(f"wrote {signature_path(output)}, signed with {certs / KEY_NAME}, the coordinator's key: guard it")
    print(f"next: holdfast federation try {output}; then every member: federation csr {output} --name NAME")


def _problem(data: Path | None, input_shape: str | None, classes: int | None) -> dict[str, Any]:
    if (data is None) == (input_shape is None):
        raise HoldfastError("say what the samples look like: either --data example.npz, or --input-shape 64")
    if data is not None:
        from holdfast.data.tables import Columns
        from holdfast_deploy.site import read_data

        dataset = read_data(data)
        if isinstance(dataset, Columns):
            return {"columns": dataset.shapes, "model": "linear", "loss": "training-step", "batch_size": 32}
        shape, scale = list(dataset.input_shape), {"mean": dataset.mean, "std": dataset.std}
        classes = classes if classes is not None else dataset.classes
    else:
        assert input_shape is not None
        try:
            shape, scale = [int(part) for part in input_shape.split(",")], {"mean": 0.0, "std": 1.0}
        except ValueError:
            raise HoldfastError(
                f"--input-shape: expected such as 64 or 1,28,28, got {input_shape!r}"
            ) from None
    problem: dict[str, Any] = {"input_shape": shape}
    if classes is not None:
        problem["classes"] = classes
    return problem | {"model": "linear", "loss": "cross-entropy", "batch_size": 32, "l2": 0.0} | scale


def _member(text: str) -> dict[str, str]:
    """``name=host:port``; a node behind a server may be just a name."""
    name, _, address = text.strip().partition("=")
    return {"name": name, "address": address} if address else {"name": name}


def _commented(text: str) -> str:
    lines, seen = [], set()
    for line in text.splitlines():
        for start, comment in COMMENTS.items():
            if line.startswith(start) and start not in seen:
                seen.add(start)
                lines.append(f"# {comment}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def certs(file: File, folder: Certs = None, days: Days = 365) -> None:
    """Make a private authority, and a key and a certificate for every member, in certs/ beside the file."""
    from holdfast.core.files import private_files
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.wire.authority import make_certificates

    federation = read_federation(file)
    target = folder or file.parent / "certs"
    names = [member.name for member in federation.certified]
    with private_files():
        make_certificates(target, federation.name, names, days)
        _sign_own(file, federation, target)
    print(f"wrote {target}: ca.crt, ca.key and NAME.crt, NAME.key for {', '.join(names)}")
    print("give every member ca.crt and its own NAME.crt and NAME.key over a safe channel; guard ca.key")


def csr(
    file: File,
    name: Name,
    folder: Certs = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Protect the key by a passphrase, which is asked for.")
    ] = False,
) -> None:
    """Make your own key, which stays with you, and a request to be signed."""
    from holdfast.core.files import private_files
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.wire.authority import check_request, make_request

    federation = read_federation(file)
    names = [member.name for member in federation.certified]
    if name not in names and federation.membership is None:  # else it may be added later
        raise unknown("name in the federation", name, names)
    target = folder or file.parent / "certs"
    with private_files():
        request = make_request(target, name, encrypt=encrypt)
    print(f"wrote {request}; send it to whoever holds ca.key, who sends {name}.crt and ca.crt back")
    key = check_request(target, request, [name], replace=True).fingerprint
    print(f"they will be shown this fingerprint of your key; tell it to them in another way: {key}")


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
    from holdfast.core.files import private_files
    from holdfast_deploy.consent import shown, signature_path
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.wire.authority import check_request, make_authority, sign_request

    requests = requests or []
    federation = read_federation(file)
    target = folder or file.parent / "certs"
    names = [member.name for member in federation.certified]
    if federation.membership is not None:  # others may be added; what they are called is shown, and compared
        names += [request.stem for request in requests if request.stem not in [*names, "ca"]]
    for request in requests:  # all of them, before any is signed
        asked = check_request(target, request, names, replace=replace)
        print(f"{request} asks for the name {asked.name} with the key {asked.fingerprint}")
    with private_files():
        if not _sign_own(file, federation, target) and not requests:
            raise HoldfastError(
                f"{target} holds no key of the coordinator of {file}: only it can sign the file"
            )
        if not requests:
            print(f"wrote {signature_path(file)}; fingerprint of the federation: {shown(federation.id)}")
            return
        make_authority(target, federation.name)
        for request in requests:
            print(f"wrote {sign_request(target, request, names, days, replace=replace)}")
    print("compare each fingerprint with what its member was shown, before you send anything back")
    print(f"send each member its certificate and {target / 'ca.crt'}; neither is secret")


def revoke(
    file: File,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose certificate is no longer valid.")],
    serial: Annotated[
        str | None, typer.Option(help="Which one, by its serial number; by default certs/NAME.crt.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the others.")] = "",
    folder: Certs = None,
) -> None:
    """Revoke a member's certificate: add it to the signed list certs/revoked.json, to be sent to all."""
    from datetime import UTC, datetime

    from pydantic import ValidationError

    from holdfast.core.files import private_files
    from holdfast.core.validation import explain, place
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.wire.credentials import serial_of
    from holdfast_deploy.wire.revocations import Revoked, revoke

    federation = read_federation(file)
    target = folder or file.parent / "certs"
    if federation.coordinator is None:
        raise HoldfastError(
            f"{file} names no coordinator: only one can revoke, and members must know its key"
        )
    federation.member(name)
    if serial is None:
        own = target / f"{name}.crt"
        if not own.exists():
            raise HoldfastError(f"{own} is missing: say which certificate, by --serial")
        serial = serial_of(own.read_bytes())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        entry = Revoked(name=name, serial=serial.replace(":", "").upper(), time=now, reason=reason)
    except ValidationError as error:
        raise HoldfastError(f"--{place(error.errors()[0]['loc'])}: {explain(error)}") from None
    with private_files():
        wrote = revoke(target, entry, federation.coordinator)
    print(f"wrote {wrote}: the certificate {entry.serial} of {name} is revoked")
    print("send it to every member, for its folder of certificates; running members need no restart")


def _sign_own(path: Path, federation: FederationFile, folder: Path) -> bool:
    """Signs the federation file if ``folder`` has its coordinator's key, and accepts it; whether it has."""
    from holdfast_deploy.consent import accept, holds_key, sign_federation

    if not holds_key(folder, federation):
        return False
    sign_federation(path, federation, folder)
    with suppress(OSError):  # no home to note it in
        accept(federation, path)
    return True
