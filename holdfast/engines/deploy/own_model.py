"""A site's own model: code that only its own command line can name, and that all members agree on by hash."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.models.load import import_model

SHOWN = 12  # hexadecimal digits of a hash in messages to people
LONGEST_NAME = 40  # characters of a class's name


@dataclass(frozen=True)
class OwnModel:
    """The class that ``--model module:Class`` names, and the file that it was read from."""

    spec: str
    name: str  # of the class
    file: Path
    sha256: str  # of the file, as ``sha256sum`` prints it

    @property
    def identity(self) -> str:
        """What other members must have, too. The module may have another name there."""
        return f"{self.name} {self.sha256}"


def read_own_model(spec: str) -> OwnModel:
    """The site's own model ``module:Class``, imported, with the hash of its source."""
    if ":" not in spec:
        raise HoldfastError(
            f"--model: expected your own module:Class, got {spec!r}; a model of holdfast is named in the "
            "federation file"
        )
    found = import_model(spec)
    try:
        file = Path(inspect.getfile(found))
        content = file.read_bytes()
    except (OSError, TypeError) as error:
        raise HoldfastError(f"--model {spec}: its source cannot be read ({error})") from None
    if not found.__name__.isascii() or len(found.__name__) > LONGEST_NAME:
        raise HoldfastError(
            f"--model {spec}: a class needs a name of at most {LONGEST_NAME} ASCII characters here"
        )
    if file.suffix != ".py":
        raise HoldfastError(f"--model {spec}: members compare its source, but {file} is not a .py file")
    return OwnModel(spec, found.__name__, file.resolve(), hashlib.sha256(content).hexdigest())


def describe_identity(identity: str) -> str:
    """``OwnModel.identity``, or "" for the model of the federation file, in a few words."""
    if not identity:
        return "the file's model"
    name, _, sha256 = identity.partition(" ")
    return f"{name[:LONGEST_NAME]} {sha256[:SHOWN]}"
