"""Experiments as files: a problem, a network and one or more algorithms, read with command-line overrides."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from holdfast.algorithms import ALGORITHMS
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.precision import Precision
from holdfast.core.validation import Cohort, Count, NonNegative, Section, Seed, Whole, quoted
from holdfast.privacy import Budget
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.topology.activity import LinkDraws


class Choice(BaseModel):
    """Something chosen by name with its own parameters; a plain string is a name without any."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str  # which one

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"every seed should stand there once, got {quoted(seeds)}")
    return seeds


def _as_choice(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Chosen = Annotated[Choice, BeforeValidator(_as_choice)]


def _as_list(metrics: Any) -> Any:
    if isinstance(metrics, dict):
        return ["default", metrics]
    if isinstance(metrics, list | tuple) and (own := [item for item in metrics if callable(item)]):
        raise ValueError(f'a figure of your own needs a name, such as {{"mae": mae}}, got {quoted(own[0])}')
    return list(metrics) if isinstance(metrics, tuple) else metrics


Seeds = Annotated[list[Seed], AfterValidator(_distinct), Field(min_length=1)]
BatchSize = Count | Literal["full"]
Cadence = Count | Literal["auto"]
Metrics = Annotated[list[str | dict[str, Any]] | Literal["default"], BeforeValidator(_as_list)]
"""Names, and the user's own by name; a table alone adds them to the default."""
Weighting = Literal["uniform", "samples"]


class Terms(Section):
    """What the objective adds up, how many samples of it a gradient reads, and how it is computed."""

    batch_size: BatchSize = 32  # samples of a minibatch; "full": all of a node
    sampling: SamplingName = "replacement"  # how minibatches are drawn
    l2: NonNegative = 0.0  # adds (l2 / 2) ||x||^2 to every node's objective
    l1: NonNegative = 0.0  # adds l1 times the sum of |x_k|
    nonconvex: NonNegative = 0.0  # adds nonconvex times the sum of x_k^2 / (1 + x_k^2)
    weights: Weighting = "uniform"  # every node counts alike; "samples": every sample does
    backend: BackendName = "auto"  # how all nodes' gradients are computed, see docs/architecture.md
    buffers: Buffers = "local"  # whose statistics BatchNorm has in a node's model, its own or the "average"

    private: Budget = None  # the privacy of every sample: epsilon, delta and clip, see docs/privacy.md

    @property
    def options(self) -> dict[str, Any]:
        """The terms as ``build_problem`` takes them; privacy depends on the method, too."""
        return self.model_dump(include=set(Terms.model_fields) - {"private"})


class LearningConfig(Terms):
    """What is learned: the same wherever it runs."""

    model: Chosen = Choice(name="linear")  # see `holdfast list models`, or module:attribute
    loss: Chosen = Choice(name="cross-entropy")  # see `holdfast list losses`, or module:attribute


class ProblemConfig(LearningConfig):
    """What is learned, from which data, and how they are spread over the nodes."""

    dataset: Chosen  # see `holdfast list datasets`, or module:attribute
    nodes: Count = 10  # how many take part
    partition: Chosen = Choice(name="iid")  # of samples among nodes; see `holdfast list partitions`
    augment: str | None = None  # module:function, what is done to minibatches on the device


class NetworkConfig(Section):
    """Who talks to whom."""

    topology: Chosen = Choice(name="ring")  # see `holdfast list topologies`
    mixing: Chosen | None = None  # Metropolis weights, unless a server averages
    aggregation: Chosen = Choice(name="mean")  # how received messages are put together
    attack: Chosen | None = None  # what some nodes send in place of their messages; None: all are honest
    cohort: Cohort = "all"  # how many clients of a server take part in a round
    graph_every: Count | None = None  # rounds after which a random topology is drawn anew; None: never
    compute: Any = None  # how likely nodes are able to compute in a round; None: always
    links: Any = None  # how likely links are available in a round; None: always
    redraw_every: Count | None = None  # rounds after which drawn probabilities are drawn anew; None: never
    link_draws: LinkDraws = "once"  # in a round; or by each end; or latched: there once, there always


class AlgorithmConfig(Choice):
    """A method with its hyperparameters; ``label`` is what it is called in tables and plots."""

    label: str = ""  # what tables and plots call it; by default its name
    curvature: Literal["given", "estimate"] = "given"  # "estimate": measure mu and L of the problem first
    local_epochs: Count | None = None  # passes over a node's data in a round, instead of local_steps


ChosenAlgorithm = Annotated[AlgorithmConfig, BeforeValidator(_as_choice)]


class Experiment(Section):
    """One fully determined experiment: exactly one algorithm, no lists to sweep over."""

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9._-]+$")  # of the run directory
    rounds: Count  # communication rounds
    seeds: Seeds = Field(default=[0])  # every method is run with each of them
    checkpoint_every: Count = 50  # rounds between checkpoints
    evaluate_every: Cadence = 1  # rounds between measurements; "auto": at most a fifth of the work
    metrics: Metrics = "default"  # what is measured; see `holdfast list metrics`
    personalize: Whole = 0  # local steps that make a node's model its own, for personal metrics
    dtype: Literal["float32", "float64"] = "float32"  # of the numbers that are trained
    precision: Precision = "tf32"  # of matrix products on a GPU
    channel: Chosen = Choice(name="identity")  # how messages travel; by default as they are
    problem: ProblemConfig
    network: NetworkConfig = NetworkConfig()
    algorithm: ChosenAlgorithm  # one or several `[[algorithm]]`, see `holdfast list algorithms`


def default_experiment() -> str:
    """The text of the default experiment."""
    return files("holdfast.experiments").joinpath("default.toml").read_text()


def read_experiment(path: Path | None, overrides: list[str]) -> dict[str, Any]:
    """The experiment in ``path`` (None: the default) with ``key.path=value`` overrides applied."""
    raw = tomllib.loads(default_experiment()) if path is None else read_toml(path, "the experiment")
    for override in overrides:
        apply_override(raw, override)
    return with_defaults(raw)


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
    entries = [_as_choice(entry) for entry in (given if isinstance(given, list) else [given])]
    if not entries:
        raise HoldfastError("algorithm: give at least one, such as [[algorithm]] name = 'local-gecl'")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise HoldfastError(f"algorithm: expected a name or a table with a name, got {quoted(entry)}")
    return entries


def with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with every omitted value written out, sweeps kept: what is stored with a run."""
    if "evaluation" in raw:
        raise HoldfastError("[evaluation]: write evaluate_every and metrics at the top, beside rounds")
    check_keys(raw, Experiment, "the experiment")
    resolved: dict[str, Any] = {}
    for name, field in Experiment.model_fields.items():
        if name == "algorithm":
            resolved[name] = _algorithms(raw)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            fields = field.annotation.model_fields.items()
            defaults = {key: _plain(inner.default) for key, inner in fields if not inner.is_required()}
            section = defaults | raw.get(name, {})
            resolved[name] = {key: value for key, value in section.items() if value is not None}
        elif name in raw or not field.is_required():
            resolved[name] = raw.get(name, _plain(field.default))
    return resolved


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **value.parameters} if value.parameters else value.name
    return value


def check_keys(raw: Mapping[str, Any], section: type[Section], where: str) -> None:
    """Complains about keys that ``section`` and its sections do not know, with the nearest valid name."""
    for key, value in raw.items():
        if key not in section.model_fields:
            raise unknown(f"key in {where}", key, section.model_fields)
        kind = section.model_fields[key].annotation
        inner = next((k for k in (kind, *get_args(kind)) if isclass(k) and issubclass(k, Section)), None)
        for table in value if get_origin(kind) is list and isinstance(value, list) else [value]:
            if inner is None or table is None:
                continue
            if not isinstance(table, dict):
                raise HoldfastError(f"{key}: expected a table, got {quoted(table)}")
            check_keys(table, inner, f"[{key}]")
