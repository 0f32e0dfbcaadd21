"""Files that are either written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.core.errors import HoldfastError

# --- files that are either written whole or not at all --------------------------------------------------


@contextmanager
def private_files() -> Iterator[None]:
    """Whatever is written within can be read by its owner alone: files 0600, folders 0700, at any umask.

    The umask belongs to the whole process: this is for commands, around all that they do.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_atomic(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes, syncs and renames: after a crash ``path`` holds the old content or the new, never a part.

    Others may write the same file at the same time: each has a temporary file of its own. What is not
    ``durable`` is not synced: a power cut may take it, as it does with what lies in a temporary folder.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        replace_durably(temporary, path)
    else:
        temporary.replace(path)


def remove_partials(folder: Path) -> None:
    """Removes what writers that were killed have left below ``folder``.

    What other threads of this process are writing just now (``write_atomic``) is left alone.
    """
    writing = {f".{thread.native_id}.partial" for thread in threading.enumerate()}
    for partial in folder.glob("**/.*.partial"):
        if "".join(partial.suffixes[-2:]) not in writing:
            partial.unlink(missing_ok=True)


def replace_durably(temporary: Path, path: Path) -> None:
    """Makes a synced temporary file the file ``path``, for good."""
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in ``folder`` survive a power cut: files made, renamed or removed there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and those above it unless they are there; from here on, it survives a power cut."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in {folder, *missing}:  # also if it was there: who made it may have been killed right after
        with suppress(PermissionError):  # of a folder above, which is not ours
            sync_folder(place.parent)


def whole_lines(content: bytes) -> bytes:
    """Of a file to which lines are appended and synced one by one: those that a power cut has left whole.

    The last one may lack its end. Or it lacks what comes before its end, and has zeros there.
    """
    before = content.rfind(b"\n", 0, -1) + 1
    last = content[before:]
    return content if last.endswith(b"\n") and b"\0" not in last else content[:before]


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode(), durable=durable)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], notes: dict[str, Any], *, durable: bool = True
) -> None:
    """Tensors with JSON ``notes`` beside them, as one safetensors file."""
    write_atomic(path, safetensors.torch.save(tensors, {"holdfast": json.dumps(notes)}), durable=durable)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``write_tensors`` wrote."""
    with _opened(path) as (file, notes):
        return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118


def read_notes(path: Path) -> dict[str, Any]:
    """The notes alone."""
    with _opened(path) as (_, notes):
        return notes


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file, json.loads((file.metadata() or {})["holdfast"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError):
        raise HoldfastError(f"{path} is not a checkpoint of holdfast, or it is damaged; delete it") from None


# --- JSON that every program can read -------------------------------------------------------------------


def json_text(content: Any, indent: int | None = None) -> str:
    """``content`` as JSON, which has no NaN and no infinity: they become null."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=indent)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
