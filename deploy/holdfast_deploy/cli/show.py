"""``holdfast federation show`` and ``accept``: what a federation will do here, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast_deploy.cli.options import Certs, File, Model, PolicyFile


def show(
    file: File,
    name: Annotated[str | None, typer.Option(help="Who you are, as in the federation file.")] = None,
    model: Model = None,
    certs: Certs = None,
    policy: PolicyFile = None,
) -> None:
    """What the federation will do at your site: what runs, what leaves, who gets it, for how long."""
    import textwrap

    from holdfast_deploy.cli.description import describe_federation
    from holdfast_deploy.consent import accepted_path, is_signed, policies, read_policy, shown
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.keys import fingerprint

    federation = read_federation(file, model)
    if name is not None:
        federation.member(name)
    signed = is_signed(file, federation)
    for paragraph in describe_federation(federation, name):
        print(f"\n{paragraph.heading}")
        for sentence in paragraph.sentences:
            print(textwrap.fill(sentence, 100, initial_indent="  - ", subsequent_indent="    "))
    print(f"\nFingerprint of the file: {shown(federation.id)}")
    if signed and federation.coordinator is not None:
        print(f"Signed by its coordinator, whose key is {fingerprint(federation.coordinator)}")
    else:
        print("Not signed: only the fingerprint shows that this is the coordinator's file.")
    asked: dict[str, Any] = {"name": name, "own_code": model is not None, "signed": signed}
    for each in policies(policy):
        for objection in read_policy(each).objections(federation, **asked):
            print(f"{each} does not allow {objection}")
    if accepted_path(federation.id).exists():
        print("You have accepted it.")
    else:
        print(
            "If the coordinator gives you the same fingerprint and you agree, run: "
            f"holdfast federation accept {shown(federation.id)} {file}"
        )


def accept(
    fingerprint: Annotated[
        str,
        typer.Argument(
            metavar="FINGERPRINT", help="As 'federation show' prints it, and the coordinator confirms it."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation file.")] = Path(
        "federation.toml"
    ),
) -> None:
    """Accept a federation file that you have read; a changed one has to be accepted again."""
    from holdfast.core.files import private_files
    from holdfast_deploy.consent import accept, check_fingerprint, is_signed
    from holdfast_deploy.federation_file import read_federation

    federation = read_federation(file)
    check_fingerprint(federation, fingerprint)
    is_signed(file, federation)  # complains about a signature of something else
    with private_files():
        accept(federation, file)
    print(f"accepted {file}; a changed file has to be accepted again")
