"""Golden entries of what people and programs rely on: names, commands, choices, defaults, refusals."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import typer
from command_line import SMALL, holdfast, process
from golden import Entries, Quantities, group

import holdfast as hf
from holdfast.cli.app import app


def _signature(thing: Any) -> str:
    """Parameters and defaults; how types are called is no promise."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return type(thing).__name__
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+|\bholdfast(\.\w+)+\.(?=\w)", "", text)  # wherever a module may be


def _own_members(kind: type) -> set[str]:
    """Public members, but for those that another public class hands down."""
    public = {getattr(hf, name) for name in hf.__all__ if inspect.isclass(getattr(hf, name))}
    inherited = {member for base in kind.__mro__[1:] if base in public for member in dir(base)}
    return {member for member in set(dir(kind)) - inherited if not member.startswith("_")}


@group("public names")
def public_names(folder: Path) -> Entries:
    for name in hf.__all__:
        thing = getattr(hf, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            found: Quantities = {"signature": _signature(thing)}
            if inspect.isclass(thing):
                found["members"] = sorted(_own_members(thing))
            yield name, found
        else:
            yield name, {"kind": type(thing).__name__}


def _commands(command: Any, name: str) -> Entries:
    """The options and arguments of a command and of all below it."""
    parameters: Quantities = {}
    for parameter in command.params:
        default = parameter.default if isinstance(parameter.default, str | int | float | bool) else None
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        parameters[names] = "required" if parameter.required else default
    yield name, {"help": (command.help or "").split("\n")[0], **parameters}
    for inner, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {inner}")


@group("commands")
def commands(folder: Path) -> Entries:
    root = typer.main.get_command(app)
    yield from ((name, found) for name, found in _commands(root, "holdfast") if " paper" not in name)


@group("choices")
def choices(folder: Path) -> Entries:
    listed = process("list", "--json", cwd=folder)  # its own: tests register channels in this one
    for kind, items in json.loads(listed.communicate()[0]).items():
        for item in items:
            found = {p["name"]: "required" if p["required"] else p["default"] for p in item["parameters"]}
            yield f"{kind[:-1]} {item['name']}", {"parameters": json.dumps(found)}


WRONG: dict[str, list[str]] = {
    "an unknown command": ["trian"],
    "an unknown option": ["run", "--quite"],
    "a file that is not there": ["run", "no.toml"],
    "an unknown key": ["run", "{small}", "round=3"],
    "an unknown method": ["run", "{small}", 'algorithm={name="gosip",lr=1}'],
    "a bad number": ["run", "{small}", "rounds=0"],
    "a missing value": ["run", "{small}", "algorithm=gossip"],
    "no server": ["run", "{small}", 'algorithm={name="fedavg",lr=0.1}'],
    "too many nodes": ["run", "{small}", "problem.nodes=5000"],
    "an unknown device": ["run", "{small}", "--device", "tpu"],
    "no run to resume": ["resume", "nowhere"],
    "no run to report": ["report", "nowhere"],
    "nothing to watch": ["watch", "--runs-dir", "nowhere"],
    "an unknown kind": ["list", "algoritms"],
    "an unknown metric to tune by": ["tune", "{small}", "--metric", "beauty"],
    "values that are none": ["tune", "{small}", "--values", "fast"],
    "no federation file": ["federation", "show", "no.toml", "--name", "a"],
    "a node without a file": ["node", "no.toml", "--name", "a", "--data", "a.npz"],
    "a server without a file": ["server", "no.toml", "--name", "hub"],
    "an unknown method for a federation": [
        *("federation", "new", "--nodes", "a=h:1,b=h:2", "--algorithm", "gosip"),
        *("--input-shape", "4", "--classes", "2", "--output", "{folder}/new.toml"),
    ],
    "one node for a federation": [
        *("federation", "new", "--nodes", "a=h:1", "--algorithm", "gossip", "algorithm.lr=0.1"),
        *("--input-shape", "4", "--classes", "2", "--output", "{folder}/new.toml"),
    ],
    "a bad address": [
        *("federation", "new", "--nodes", "a=h,b=h:2", "--algorithm", "gossip", "algorithm.lr=0.1"),
        *("--input-shape", "4", "--classes", "2", "--output", "{folder}/new.toml"),
    ],
    "a file that exists": ["init", "{small}"],
}


@group("refusals")
def refusals(folder: Path) -> Entries:
    small = folder / "small.toml"
    small.write_text(SMALL)
    for name, arguments in WRONG.items():
        given = [text.replace("{small}", f"{small}").replace("{folder}", f"{folder}") for text in arguments]
        if given[0] in ("run", "tune"):
            given += ["--runs-dir", str(folder / "runs")]
        outcome = holdfast(*given)
        said = outcome.err.replace(str(folder), "FOLDER").strip()
        said = re.sub(r":? choose from .*", "", said)  # what there is, of which tests may register more
        # Drawn boxes have the width of a terminal.
        yield name, {"code": outcome.code, **({"said": said} if said.startswith("error:") else {})}
