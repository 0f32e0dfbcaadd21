"""The golden record: what holdfast computes, sends and says today, against what it did when last recorded.

    python tests/golden/golden.py            # what differs from the record
    python tests/golden/golden.py --write    # records it anew, keeping what differs only by rounding
    python tests/golden/golden.py channels   # only some groups

Floats are compared with a tolerance, never bit by bit: another processor rounds otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

RECORD = Path(__file__).parent / "record.json"
CLOSE = 1e-9  # relative; what is recorded is computed in float64
ZERO = 1e-12  # numbers below are rounding errors

Quantities = dict[str, Any]  # of one entry, by name: texts, whole numbers, floats, or lists of them
Entries = Iterable[tuple[str, Quantities]]
Making = Callable[[Path], Entries]


class Group(NamedTuple):
    """Entries that are computed together, in a folder of their own."""

    make: Making
    slow: bool


GROUPS: dict[str, Group] = {}


def group(name: str, *, slow: bool = False) -> Callable[[Making], Making]:
    """Decorator: registers a function that computes the entries of the group called ``name``."""

    def register(make: Making) -> Making:
        GROUPS[name] = Group(make, slow)
        return make

    return register


def digest(values: Any) -> list[Any]:
    """A tensor or array in a few numbers: its shape, its norm, and three weighted sums of its entries."""
    rows = torch.as_tensor(values)
    flat = rows.detach().double().flatten().numpy()
    position = np.arange(1, len(flat) + 1)
    weights = [np.cos(position * turn) / math.sqrt(max(1, len(flat))) for turn in (0.0, 0.7, 2.3)]
    form = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
    return [form, float(np.linalg.norm(flat)), *(float((flat * weight).sum()) for weight in weights)]


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back, floats with twelve digits, infinite and undefined ones as text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"the golden record holds plain values only, got {value!r}")


def computed(name: str) -> dict[str, Quantities]:
    """The entries of a group, as today's code computes them."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting says which orders it leaves out
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {entry: plain(found) for entry, found in GROUPS[name].make(Path(folder))}
    finally:
        torch.set_num_threads(threads)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(recorded: Any, found: Any, scale: float = 0.0) -> bool:
    """Whether two values are equal but for rounding; numbers of a list are of the scale of its largest."""
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        sizes = [abs(value) for value in recorded if isinstance(value, float)]
        pairs = zip(recorded, found, strict=True)
        return all(same(a, b, max(sizes, default=0.0)) for a, b in pairs)
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        return all(same(recorded[key], found[key]) for key in recorded)
    if _is_number(recorded) and _is_number(found) and (type(recorded) is float or type(found) is float):
        return abs(recorded - found) <= max(ZERO, CLOSE * max(scale, abs(recorded)))
    return type(recorded) is type(found) and bool(recorded == found)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def differences(recorded: dict[str, Quantities], found: dict[str, Quantities]) -> Iterator[str]:
    """What is not as recorded, a line for each quantity."""
    for entry in recorded.keys() | found.keys():
        if entry not in found:
            yield f"{entry}: recorded, but not there any more"
        elif entry not in recorded:
            yield f"{entry}: not in the record"
        else:
            old, new = recorded[entry], found[entry]
            for name in old.keys() | new.keys():
                if name not in old or name not in new:
                    yield f"{entry}: {name}: {'recorded, but not there any more' if name in old else 'new'}"
                elif not same(old[name], new[name]):
                    yield f"{entry}: {name}: recorded {_short(old[name])}, now {_short(new[name])}"


def kept(recorded: dict[str, Quantities], found: dict[str, Quantities]) -> dict[str, Quantities]:
    """``found``, with the recorded digits wherever that differs only by rounding."""
    return {
        entry: {
            name: recorded[entry][name]
            if name in recorded.get(entry, {}) and same(recorded[entry][name], value)
            else value
            for name, value in quantities.items()
        }
        for entry, quantities in found.items()
    }


def read_record() -> dict[str, dict[str, Quantities]]:
    """All groups as they were recorded."""
    read: dict[str, dict[str, Quantities]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return read


def write_record(record: dict[str, dict[str, Quantities]]) -> None:
    """Writes the record: a line for each quantity, so that a diff can be read."""
    lines = []
    for name, entries in sorted(record.items()):
        inner = []
        for entry, quantities in sorted(entries.items()):
            values = [
                f"   {json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
                for key, value in sorted(quantities.items())
            ]
            inner.append(f"  {json.dumps(entry, ensure_ascii=False)}: {{\n" + ",\n".join(values) + "\n  }")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Compares or records; the exit code is 1 if something differs."""
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\nGroups: {', '.join(GROUPS)}")
        return 0
    write, names = "--write" in arguments, [name for name in arguments if name != "--write"]
    if unknown := set(names) - GROUPS.keys():
        print(f"there is no group {', '.join(unknown)}; there are: {', '.join(GROUPS)}")
        return 2
    record = read_record() if RECORD.exists() else {}
    differing = 0
    for name in names or GROUPS:
        found = computed(name)
        lines = sorted(differences(record.get(name, {}), found))
        differing += len(lines)
        print("\n".join([f"{name}: {len(found)} entries, {len(lines)} differences", *lines[:40]]), flush=True)
        record[name] = kept(record.get(name, {}), found)
    if write:
        write_record({name: record[name] for name in record if name in GROUPS})
    return 0 if write else int(differing > 0)


def load_groups() -> None:
    """Imports the modules that register groups."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent, here.parent / "support", here.parent / "contract"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    for module in ("golden_interfaces", "golden_training", "golden_runs", "golden_deployed"):
        import_module(module)


if __name__ == "__main__":
    sys.modules["golden"] = sys.modules["__main__"]  # one registry, whoever imports this
    load_groups()
    sys.exit(main(sys.argv[1:]))
