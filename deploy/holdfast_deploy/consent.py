"""Whether this site takes part: the coordinator's signature, the site's policy, and a person's acceptance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast.core.files import write_atomic, write_json
from holdfast.core.validation import Positive, Section, Whole
from holdfast.experiments.spec import check_keys, read_toml
from holdfast_deploy.exposure import as_configured, gives_gradients_away, most_delta
from holdfast_deploy.federation_file import FederationFile
from holdfast_deploy.keys import (
    KEY_NAME,
    Signature,
    fingerprint,
    load_key,
    public_key,
    sign,
    verify,
)

MACHINE_POLICY = Path("/etc/holdfast/policy.toml")  # holds for every member on the machine, beside --policy


class ConsentError(HoldfastError):
    """This site does not, or not yet, allow what the federation file asks for."""

    exit_code = REFUSED


# --- the coordinator's signature ---------------------------------------------------------------------------


def signature_path(path: Path) -> Path:
    """Where the signature of the federation file ``path`` stands."""
    return path.with_name(path.name + ".sig")


def sign_federation(path: Path, federation: FederationFile, folder: Path) -> None:
    """Writes the coordinator's signature of the federation, with its key in ``folder``."""
    signature = sign("federation", federation.agreement, load_key(folder))
    if signature.key != federation.coordinator:
        raise HoldfastError(
            f"{path}: its coordinator is not the holder of {folder / KEY_NAME}; that key belongs to "
            f'coordinator = "{signature.key}"'
        )
    place, content = signature_path(path), signature.model_dump_json().encode() + b"\n"
    if not place.exists() or place.read_bytes() != content:  # else its folder may be read-only
        write_atomic(place, content)


def holds_key(folder: Path, federation: FederationFile) -> bool:
    """Whether ``folder`` has the key of this federation's coordinator."""
    return (folder / KEY_NAME).exists() and public_key(load_key(folder)) == federation.coordinator


def is_signed(path: Path, federation: FederationFile) -> bool:
    """Whether the coordinator has signed the federation; an error if the signature is of something else."""
    place = signature_path(path)
    if federation.coordinator is None or not place.exists():
        return False
    try:
        signature = Signature.model_validate_json(place.read_bytes())
        verify("federation", federation.agreement, signature, trusted=federation.coordinator)
    except ValidationError:
        raise ConsentError(f"{place} is not a signature; ask the coordinator for the file") from None
    except HoldfastError as error:
        raise ConsentError(f"{place}: {error}") from None
    return True


# --- what this site allows ---------------------------------------------------------------------------------


class Policy(Section):
    """What a site allows. What is not in the policy file is allowed."""

    own_code: bool = True  # --model and --data module:...
    raw_gradients: bool = True  # methods whose messages give a single gradient away
    min_members: Whole = 0  # nodes of the federation
    require_dp: bool = False  # differential privacy of all that leaves
    trust_server: bool = False  # whether noise that a server adds, to what leaves without, is enough for that
    max_epsilon: Positive | None = None  # the largest privacy budget; None: any
    max_delta: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: see ``most_delta``
    require_signature: bool = False
    coordinators: list[str] | None = None  # fingerprints of the keys that may sign; None: any

    def objections(
        self, federation: FederationFile, *, name: str | None = None, own_code: bool, signed: bool
    ) -> Iterator[str]:
        """What of the federation the site does not allow. ``name``: the node here; None: any of them."""
        if own_code and not self.own_code:
            yield "code of one's own (own_code): leave out --model, and give --data as a file"
        if not self.raw_gradients and gives_gradients_away(federation, name):
            sender = f"{federation.algorithm_name} {as_configured(federation, name)}"
            yield (
                f"raw gradients (raw_gradients): {sender} sends them; "
                "take another method, or more local steps"
            )
        rules, there_are = federation.membership, len(federation.node)
        least = there_are if rules is None else min(there_are, rules.minimum)
        if least < self.min_members:
            be = "are" if rules is None else "may be"
            yield f"fewer than {self.min_members} nodes (min_members): there {be} {least}"
        private = federation.problem.private
        if self.require_dp and private is None:
            yield "training without differential privacy (require_dp): the federation has none"
        if self.require_dp and not self.trust_server and federation.trusts_server:
            yield (
                "noise that the server adds (require_dp): your messages leave without any; ask for noise = "
                "'clients' or 'distributed', or set trust_server = true"
            )
        if private is not None and self.max_epsilon is not None and private.epsilon > self.max_epsilon:
            yield f"epsilon = {private.epsilon:g} (max_epsilon = {self.max_epsilon:g}): ask for less"
        if private is not None and (self.require_dp or self.max_epsilon is not None or self.max_delta):
            most = self.max_delta or most_delta(federation, private, name)
            if private.delta > most:
                yield f"delta = {private.delta:g} (max_delta = {most:g}): ask for less"
        if not signed and (self.require_signature or self.coordinators is not None):
            yield "a federation that its coordinator has not signed (require_signature)"
        elif self.coordinators is not None and federation.coordinator is not None:
            key = fingerprint(federation.coordinator)
            if key not in self.coordinators:
                yield f"the coordinator with the key {key} (coordinators)"


def read_policy(path: Path) -> Policy:
    """The policy in the file ``path``."""
    raw = read_toml(path, "the policy file")
    check_keys(raw, Policy, "the policy file")
    try:
        return Policy.of(raw)
    except HoldfastError as error:
        raise HoldfastError(f"{path}: {error}") from None


def policies(given: Path | None) -> list[Path]:
    """The policy files that hold here: the machine's, and the ``given`` one."""
    return [path for path in (MACHINE_POLICY, given) if path is not None and (path == given or path.exists())]


def require_policies(
    federation: FederationFile, policy: Path | None, *, name: str | None, own_code: bool, signed: bool
) -> None:
    """Refuses what the machine's policy or the given one does not allow the member ``name`` to do."""
    asked: dict[str, Any] = {"name": name, "own_code": own_code, "signed": signed}
    for each in policies(policy):
        for objection in read_policy(each).objections(federation, **asked):
            raise ConsentError(f"{each} does not allow {objection}")


# --- acceptance --------------------------------------------------------------------------------------------


def shown(id: str) -> str:
    """A federation's fingerprint as people compare it: groups of four digits."""
    return ":".join(id[i : i + 4] for i in range(0, len(id), 4))


def accepted_path(id: str) -> Path:
    """A file that exists if this user has accepted the federation."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "holdfast" / "accepted" / id


def accept(federation: FederationFile, path: Path) -> None:
    """Notes permanently that this user accepts the federation."""
    note = accepted_path(federation.id)
    note.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(note, {"file": str(path.resolve()), "name": federation.name, "accepted": now})


def check_fingerprint(federation: FederationFile, given: str) -> None:
    """Refuses a fingerprint that is not the federation's."""
    if given.replace(":", "").lower() != federation.id:
        raise ConsentError(
            f"the file's fingerprint is {shown(federation.id)}, not {given}: it is not the file that you "
            "were told of; read it with 'holdfast federation show', and ask the coordinator"
        )


def require_consent(
    federation: FederationFile,
    path: Path,
    certs: Path | None,
    *,
    policy: Path | None = None,
    name: str | None = None,
    own_code: bool = False,
    accepting: str | None = None,
) -> None:
    """Refuses to start unless policies allow it and a person here has accepted the file.

    No acceptance is needed for a file of one's own, where the folder ``certs`` holds the authority's or the
    coordinator's key; nor where nothing leaves the machine, with ``certs`` None. ``accepting`` is a
    fingerprint that is accepted from now on.
    """
    own = certs is None or (certs / "ca.key").exists()
    if certs is not None and holds_key(certs, federation):
        own = True
        sign_federation(path, federation, certs)  # the holder of the key may edit the file
    signed = is_signed(path, federation)
    require_policies(federation, policy, name=name, own_code=own_code, signed=signed)
    if accepting is not None:
        check_fingerprint(federation, accepting)
        with suppress(OSError):  # a container without a home is given the fingerprint every time
            accept(federation, path)
        return
    if not own and not accepted_path(federation.id).exists():
        raise ConsentError(
            f"{path} has not been accepted here, or has changed since. Read 'holdfast federation show "
            f"{path}', compare the fingerprint with the coordinator's, then 'holdfast federation accept "
            f"FINGERPRINT {path}'"
        )
