"""A site's own model: code that only its own command line can name, and that all members agree on by hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.own_source import OwnSource, find_source
from holdfast.models.base import import_model

SHOWN = 12  # hexadecimal digits of a hash in messages
LONGEST_NAME = 40  # characters of a class's name


@dataclass(frozen=True)
class OwnModel:
    """The class that ``--model module:Class`` names, and the source that was read for it."""

    spec: str
    name: str  # of the class
    source: OwnSource

    @property
    def file(self) -> Path:
        """Where the source stands."""
        return self.source.file

    @property
    def sha256(self) -> str:
        """Of the file, as ``sha256sum`` prints it."""
        return self.source.sha256

    @property
    def identity(self) -> str:
        """What other members must have, too. The module may have another name there."""
        return f"{self.name} {self.sha256}"

    def run(self) -> None:
        """Runs the source as it was read, so that the model can then be made by its name."""
        try:
            module = self.source.run()
        except HoldfastError as error:
            raise HoldfastError(f"--model {self.spec}: {error}") from None
        except Exception as error:  # whatever the site's own code complains about
            reason = " ".join(str(error).split())
            raise HoldfastError(
                f"--model {self.spec}: {self.file} fails when it is run ({type(error).__name__}: {reason})"
            ) from error
        found = import_model(self.spec)
        if found.__module__ != module.__name__:
            raise HoldfastError(
                f"--model {self.spec}: the class comes from {found.__module__!r}, and not from {self.file}, "
                "which members compare; name the module that defines it"
            )


def read_own_model(spec: str) -> OwnModel:
    """The site's own model ``module:Class`` with its source, of which nothing is run."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise HoldfastError(
            f"--model: expected your own module:Class, got {spec!r}; a model of holdfast is named in the "
            "federation file"
        )
    try:
        source = find_source(module)
        if name not in source.classes:
            raise unknown(f"class in {source.file}", name, source.classes)
        source.check_alone()
    except HoldfastError as error:
        raise HoldfastError(f"--model {spec}: {error}") from None
    if not name.isascii() or len(name) > LONGEST_NAME:
        raise HoldfastError(
            f"--model {spec}: a class needs a name of at most {LONGEST_NAME} ASCII characters here"
        )
    return OwnModel(spec, name, source)


def describe_identity(identity: str) -> str:
    """``OwnModel.identity``, or "" for the model of the federation file, in a few words."""
    if not identity:
        return "the file's model"
    name, _, sha256 = identity.partition(" ")
    return f"{name[:LONGEST_NAME]} {sha256[:SHOWN]}"
