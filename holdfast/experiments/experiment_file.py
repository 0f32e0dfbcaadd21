"""Experiment files: read with overrides from the command line, and with every omitted value written out."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from inspect import isclass
from pathlib import Path
from typing import Any, get_args, get_origin

from holdfast.algorithms import ALGORITHMS
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.validation import Section, quoted
from holdfast.experiments.option_forms import Choice, as_table
from holdfast.experiments.spec import Experiment


def default_experiment() -> str:
    """The text of the default experiment."""
    return files("holdfast.experiments").joinpath("default.toml").read_text()


def read_experiment(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """As ``read_overridden``, with every omitted value written out."""
    return with_defaults(read_overridden(path, overrides))


def read_overridden(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The experiment in ``path`` (None: the default) with ``key.path=value`` overrides applied."""
    raw = tomllib.loads(default_experiment()) if path is None else read_toml(path, "the experiment")
    for override in overrides:
        apply_override(raw, override)
    return raw


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables in ``path``, which is to be ``what``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HoldfastError(f"cannot read {what} {path}: {error.strerror}") from None
    return _toml(_toml_text(content, path), path)


def _toml_text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # some editors begin a file with a mark
    except ValueError as error:
        raise HoldfastError(f"{path} is not valid TOML: {error}") from None


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists as deep
        raise HoldfastError(f"{path} is not valid TOML: {error}") from None


MOST_BYTES = 8 * 2**20  # of a file from others
MOST_DOTS = 20  # in a row: no key of ours lies so deep, and each such takes the parser longer
_KEY = r"(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')"
_DEEP = re.compile(rf"(?:\.[ \t]*+{_KEY}[ \t]*+){{{MOST_DOTS}}}")


def read_foreign_toml(path: Path, what: str) -> dict[str, Any]:
    """As ``read_toml``, of a file that may come from others: refuses what would take for ever to read."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise HoldfastError(f"cannot read {what} {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise HoldfastError(f"{path} has more than {MOST_BYTES} bytes, which {what} does not need")
    text = _toml_text(content, path)
    if _DEEP.search(text):
        raise HoldfastError(f"{path} is not {what}: it has keys of {MOST_DOTS} parts")
    return _toml(text, path)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets ``key.path=value`` in ``raw``; the value is read as TOML, a bare word as a string.

    ``algorithm.lr=0.1`` sets it for every algorithm, ``algorithm.gossip.lr=0.1`` for one of them.
    """
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise HoldfastError(f"override {override!r}: expected key.path=value, such as network.topology=ring")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    targets = [raw]
    if path[0] == "algorithm" and len(path) > 1:
        targets, path = _algorithm_targets(raw, path)
    for target in targets:
        for part in path[:-1]:
            inner = target.get(part, {})
            target[part] = target = {"name": inner} if isinstance(inner, str) else inner
            if not isinstance(target, dict):
                raise HoldfastError(f"override {override!r}: {part!r} is not a table")
        target[path[-1]] = copy.deepcopy(value)


def _algorithm_targets(raw: dict[str, Any], path: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    entries = _algorithms(raw)
    raw["algorithm"] = entries
    named = [entry for entry in entries if path[1] in (entry.get("label"), entry.get("name"))]
    if named and len(path) == 2:
        raise HoldfastError(f"override: expected a parameter, such as algorithm.{path[1]}.lr=0.1")
    if named:
        return named, path[2:]
    if len(path) > 2 and path[1] in ALGORITHMS:
        present = ", ".join(str(entry.get("label") or entry.get("name")) for entry in entries)
        raise HoldfastError(f"override: algorithm {path[1]!r} is not in the experiment, which has {present}")
    return entries, path[1:]


def _algorithms(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = raw.get("algorithm", [])
    entries = [as_table(entry) for entry in (given if isinstance(given, list) else [given])]
    if not entries:
        raise HoldfastError("algorithm: give at least one, such as [[algorithm]] name = 'local-gecl'")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise HoldfastError(f"algorithm: expected a name or a table with a name, got {quoted(entry)}")
    return entries


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with every omitted value written out, sweeps kept: what is stored with a run."""
    check_keys(raw, Experiment, "the experiment")
    resolved: dict[str, Any] = {}
    for name, field in Experiment.model_fields.items():
        if name == "algorithm":
            resolved[name] = _algorithms(raw)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            fields = field.annotation.model_fields.items()
            defaults = {key: _plain(inner.default) for key, inner in fields if not inner.is_required()}
            resolved[name] = _without_none(defaults | raw.get(name, {}))
        elif name in raw or not field.is_required():
            resolved[name] = raw.get(name, _plain(field.default))
    return _without_none(resolved)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Choice) else copy.copy(value)


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """A file has no word for what is not chosen."""
    return {key: value for key, value in table.items() if value is not None}


def check_keys(
    raw: Mapping[str, Any], section: type[Section], where: str, whole: type[Section] | None = None
) -> None:
    """Complains about keys that ``section`` and its sections do not know, with the nearest valid name.

    ``whole`` is what the file holds, where ``section`` is a table of it.
    """
    whole = whole or section
    for key, value in raw.items():
        if key in section.moved:
            raise HoldfastError(section.moved[key])
        if key not in section.model_fields:
            raise unknown(f"key in {where}", key, section.model_fields, _stands_at(key, whole))
        kind, inner = section.model_fields[key].annotation, _section_of(section, key)
        for table in value if get_origin(kind) is list and isinstance(value, list) else [value]:
            if inner is None or table is None:
                continue
            if not isinstance(table, dict):
                raise HoldfastError(f"{key}: expected a table, got {quoted(table)}")
            check_keys(table, inner, f"[{key}]", whole)


def _section_of(section: type[Section], key: str) -> type[Section] | None:
    """What a table, or a list of tables, called ``key`` holds; None: it is no table."""
    kind = section.model_fields[key].annotation
    return next((k for k in (kind, *get_args(kind)) if isclass(k) and issubclass(k, Section)), None)


def _stands_at(key: str, whole: type[Section]) -> str | None:
    """Where in a file ``key`` is known: at its top, or in one of its tables."""
    if key in whole.model_fields:
        return f"{key!r}, above all tables"
    tables = ((table, _section_of(whole, table)) for table in whole.model_fields)
    found = (f"{table}.{key}" for table, inner in tables if inner is not None and key in inner.model_fields)
    path = next(found, None)
    return None if path is None else repr(path)
