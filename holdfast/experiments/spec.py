"""What a run is: every option with its type, its default and its meaning, in one place.

Python calls, experiment files, overrides on the command line, ranks of a cluster and federation files read
these classes. A new option is one line here: it is accepted everywhere then, and stands in ``help(hf.train)``
and in the tables of the documentation, where the comment beside it says what it means. ``make options``
brings ``TrainOptions``, at the end of this file, up to date for editors and type checkers.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypedDict,
    TypeVar,
    get_args,
)

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
)
from pydantic.fields import FieldInfo

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.precision import Precision
from holdfast.core.validation import Cohort, Count, NonNegative, Section, Whole, explain, place
from holdfast.experiments.option_forms import (
    BatchSize,
    Cadence,
    Choice,
    GivenAggregation,
    GivenAttack,
    GivenAugment,
    GivenChannel,
    GivenData,
    GivenLoss,
    GivenMetrics,
    GivenMixing,
    GivenModel,
    GivenPartition,
    GivenStep,
    GivenTests,
    NumberType,
    Seeds,
    Topology,
    Weighting,
    as_table,
)
from holdfast.privacy import Budget
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.topology.activity import LinkDraws

if TYPE_CHECKING:
    from holdfast.data.per_node import Tests
else:
    Tests = Any  # its definition names pandas, which may not be installed

# --- the options ----------------------------------------------------------------------------------------
#
# The comment beside an option, and the lines of comments below it, are its meaning in the documentation.


class Objective(Section):
    """What is minimised, how many samples a gradient reads, how it is computed; also of federations."""

    model: GivenModel = Choice(name="linear")  # see `holdfast list models`, or module:attribute
    # In Python also a module: every node starts from it, and it is copied, not changed.
    loss: GivenLoss = Choice(name="cross-entropy")  # see `holdfast list losses`, or module:attribute
    # In Python also a function of outputs and targets that gives a mean over the batch or a number for each
    # sample, such as `nn.CrossEntropyLoss(weight=...)`.
    batch_size: BatchSize = 32  # samples of a minibatch; "full": all of a node
    sampling: SamplingName = "replacement"  # how minibatches are drawn
    # Or "epochs": every sample once before any is taken again, starting over in every round; or "poisson":
    # each sample with probability batch_size / N_i.
    l2: NonNegative = 0.0  # adds (l2 / 2) ||x||^2 to every node's objective
    l1: NonNegative = 0.0  # adds l1 times the sum of |x_k|
    nonconvex: NonNegative = 0.0  # adds nonconvex times the sum of x_k^2 / (1 + x_k^2)
    weights: Weighting = "uniform"  # every node counts alike; "samples": every sample does
    backend: BackendName = "auto"  # how all nodes' gradients are computed, see docs/architecture.md
    # All nodes "stacked" in one call, in a "loop" over the nodes, or as "adapters", with the frozen part of
    # the model run once over all nodes' batches. "auto" chooses by what is trained and how fast its layers
    # are.
    buffers: Buffers = "local"  # whose statistics BatchNorm has in a node's model, its own or the "average"
    # The average of all models has the average in any case.
    private: Budget = None  # the privacy of every sample, or of every node: see docs/privacy.md
    # A table with epsilon, delta and clip; in Python also `hf.DP(...)`, or `hf.NodeDP(...)` for methods that
    # a server leads. The first needs sampling "poisson" or batch_size "full".

    @property
    def options(self) -> dict[str, Any]:
        """What ``build_problem`` takes as it is; privacy depends on the method, too."""
        return self.model_dump(include=set(Objective.model_fields) - {"model", "loss", "private"})


class ProblemSpec(Objective):
    """What is learned, from which data, and how they are spread over the nodes."""

    dataset: GivenData  # see `holdfast list datasets`, or module:attribute
    # In Python it is called data: the result of `hf.partition`, `hf.from_frame` or `hf.from_datasets`; an
    # `hf.Stream`; or, for each node, a pair (x, y), a dictionary of tensors or a map-style Dataset
    # (docs/data.md). x may be a tensor, a dictionary of the model's keyword arguments or a tuple of its
    # arguments. Or a name, such as "digits", which brings its own test set.
    nodes: Count = 10  # how many take part, if the data are chosen by name
    partition: GivenPartition = Choice(name="iid")  # of samples among nodes; see `holdfast list partitions`
    test: GivenTests = None  # samples that all models are tested on, or a list with a set for each node
    # Of data from a frame also a frame or a CSV file, which is read like them.
    augment: GivenAugment = None  # module:function, what is done to minibatches on the device
    # `augment(samples, key)` draws from `key` by `hf.random_uniform` and `hf.random_normal`; metrics read the
    # samples as they are.
    step: GivenStep = None  # module:function, instead of a loss: `step(model, batch)` computes it
    # The batch has the form of the data: `step=lambda model, batch: model(**batch).loss`.


class NetworkSpec(Section):
    """Which nodes talk to one another, and how what they receive is combined; also of federations."""

    moved: ClassVar[Mapping[str, str]] = {
        "latched_links": 'network.latched_links: write link_draws = "latched"'
    }

    topology: Topology = Choice(name="server")  # see `holdfast list topologies`
    # In Python also a graph, or a `Network`.
    mixing: GivenMixing = None  # the weights on the links: Metropolis weights, unless a server averages
    aggregation: GivenAggregation = Choice(name="mean")  # how received messages are put together
    # By name, or such as `hf.TrimmedMean(2)`, see docs/robust.md. By default a `Network` keeps its own.
    attack: GivenAttack = None  # what some nodes send in place of their messages; None: all are honest
    # By name, or such as `hf.SignFlip([0, 3])`; figures are then about the others.
    cohort: Cohort = "all"  # how many clients of a server take part in a round
    graph_every: Count | None = None  # rounds after which a random topology is drawn again; None: never
    compute: Any = None  # how likely nodes are able to compute in a round; None: always
    links: Any = None  # how likely links are available in a round; None: always
    redraw_every: Count | None = None  # rounds after which drawn probabilities are drawn again; None: never
    link_draws: LinkDraws = "once"  # in a round; or by each end; or latched: there once, there always


class TrainSpec(Section):
    """All that the methods of a run have in common.

    Every leaf has a name of its own: files have them in tables, Python gives them flat.
    """

    rounds: Count  # communication rounds
    local_epochs: Count | None = None  # passes over a node's data in a round, instead of local_steps
    # All nodes take as many steps: where they have different numbers of samples, the mean of what each would
    # need, rounded up, and a warning says how often each passes over its data (docs/data.md).
    checkpoint_every: Count = 50  # rounds between checkpoints
    evaluate_every: Cadence = "auto"  # rounds between measurements; "auto": at most a fifth of the work
    # Counted in samples. The initial and the last models are always measured.
    metrics: GivenMetrics = Field(default=["default", "minibatch_loss"])  # what is measured
    # See `holdfast list metrics`. "default" are all that are cheap, "minibatch_loss" is free. A dictionary
    # has your own: functions of (outputs, targets) or objects of torchmetrics; see docs/experiments.md.
    personalize: Whole = 0  # local steps that make a node's model its own, for personal metrics
    dtype: NumberType = "float32"  # of the numbers that are trained
    precision: Precision = "tf32"  # of matrix products on a GPU
    # "tf32", or strict "float32"; "bfloat16" computes the training steps in it, here or there, while the
    # models stay in `dtype`.
    channel: GivenChannel = Choice(name="identity")  # how messages travel; by default as they are
    # By name, such as "half", or `hf.Half()`.
    problem: ProblemSpec
    network: NetworkSpec = NetworkSpec()

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any]) -> Self:
        """The leaves that are ``given`` without their tables; None, where it is allowed, is the default."""
        tables: dict[str, Any] = {"problem": {}}
        for name, value in given.items():
            leaf = leaves(cls)[name]
            allowed = name in UNSAID or NoneType in get_args(leaf.field.annotation)
            if value is not None or not allowed:
                (tables.setdefault(leaf.table, {}) if leaf.table else tables)[leaf.key] = value
        return _of_flat(cls, tables)

    @property
    def numbers(self) -> torch.dtype:
        """The type of the numbers that are trained."""
        found: torch.dtype = getattr(torch, str(self.dtype))
        return found


class AlgorithmConfig(Choice):
    """A method with its hyperparameters; ``label`` is what it is called in tables and plots."""

    label: str = ""  # what tables and plots call it; by default its name
    curvature: Literal["given", "estimate"] = "given"  # "estimate": measure mu and L of the problem first
    local_epochs: Count | None = None  # passes over a node's data in a round, instead of local_steps


ChosenAlgorithm = Annotated[AlgorithmConfig, BeforeValidator(as_table)]


class Experiment(TrainSpec):
    """One fully determined experiment: exactly one algorithm, no lists to sweep over."""

    moved: ClassVar[Mapping[str, str]] = {
        "evaluation": "[evaluation]: write evaluate_every and metrics at the top, beside rounds"
    }

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9._-]+$")  # of the run directory
    seeds: Seeds = Field(default=[0])  # every method is run with each of them
    algorithm: ChosenAlgorithm  # one or several `[[algorithm]]`, see `holdfast list algorithms`


# --- options by name, for Python ------------------------------------------------------------------------


CALLED = {"dataset": "data"}  # what Python calls what an experiment file calls otherwise
UNSAID = {"nodes"}  # None stands for their default, where data may be given or named


class Leaf(NamedTuple):
    """An option, and where it stands in a file."""

    table: str  # "" for the top
    key: str
    field: FieldInfo

    @property
    def default(self) -> Any:
        """As one would write it."""
        given = self.field.default
        return given.plain if isinstance(given, Choice) else given


@functools.cache
def leaves(section: type[Section]) -> dict[str, Leaf]:
    """All options of ``section`` and of its tables, as Python calls them."""
    found = {}
    for table, key, field in _fields(section, ""):
        found[CALLED.get(key, key)] = Leaf(table, key, field)
    return found


def _fields(section: type[Section], table: str) -> Iterator[tuple[str, str, FieldInfo]]:
    for key, field in section.model_fields.items():
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, Section):
            yield from _fields(kind, key)
        else:
            yield table, key, field


S = TypeVar("S", bound=Section)


def _of_flat(section: type[S], tables: Mapping[str, Any]) -> S:
    """As ``Section.of``; an error names the leaf alone, as Python calls it."""
    try:
        return section.model_validate(tables)
    except ValidationError as error:
        where = error.errors()[0]["loc"]
        inner = section.model_fields[str(where[0])].annotation
        own = where[1:] if inspect.isclass(inner) and issubclass(inner, Section) else where
        name, dot, rest = place(own).partition(".")
        raise HoldfastError(f"{CALLED.get(name, name)}{dot}{rest}: {explain(error)}") from None


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """What the comments beside the fields say, of the class and of those that it derives from."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if owner not in (Section, BaseModel) and issubclass(owner, BaseModel):
            lines = re.findall(
                r"^    (\w+):[^#\n]*(# .+(?:\n    # .+)*)", inspect.getsource(owner), re.MULTILINE
            )
            found |= {name: ". ".join(_sentences(text)) for name, text in lines}
    return found


def _sentences(comment: str) -> Iterator[str]:
    """The first line of a comment, and those below it as one."""
    first, *more = re.sub(r"^ *# ", "", comment, flags=re.MULTILINE).split("\n")
    yield first
    if more:
        yield " ".join(more)


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(section: type[Section]) -> Callable[[F], F]:
    """Decorator: ``**options`` are the leaves of ``section``.

    Their names, types and defaults are shown in the function's signature, and where its docstring says
    ``{options}``, what they mean.
    """

    def show(function: F) -> F:
        written = inspect.signature(function).parameters
        *own, _ = written.values()
        said = {name: text for part in _sections(section) for name, text in meanings(part).items()}
        left = {name: leaf for name, leaf in leaves(section).items() if name not in written}
        typed = TrainOptions.__annotations__
        types = {name: getattr(of, "__forward_arg__", of) for name, of in typed.items()}
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=leaf.default,
                annotation=types.get(name, leaf.field.annotation),
            )
            for name, leaf in left.items()
        ]
        shown = [f"``{name}``: {said[leaf.key]}" for name, leaf in left.items()]
        wrapped = [textwrap.fill(f"{text.rstrip('.')}.", 106, break_long_words=False) for text in shown]
        if function.__doc__ is not None:
            function.__doc__ = function.__doc__.replace(
                "    {options}", textwrap.indent("\n".join(wrapped), " " * 4)
            )
        signature = inspect.signature(function).replace(parameters=[*own, *named])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return show


def _sections(section: type[Section]) -> list[type[Section]]:
    """The section and those in it."""
    kinds = [field.annotation for field in section.model_fields.values()]
    return [section, *(kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section))]


def check_names(origin: str, section: type[Section], given: Mapping[str, Any], others: set[str]) -> None:
    """Complains about what is not an option; ``others`` are known, too."""
    for name in given:
        if name not in leaves(section):
            raise unknown(f"argument of {origin}", name, {*leaves(section), *others})


# What follows is written by ``make options`` from the classes above, for editors and type checkers.


class ObjectiveOptions(TypedDict, total=False):
    """The options of ``hf.build_problem`` that it does not name itself."""

    batch_size: BatchSize
    sampling: SamplingName
    l2: NonNegative
    l1: NonNegative
    nonconvex: NonNegative
    weights: Weighting
    backend: BackendName
    buffers: Buffers
    private: Budget


class NetworkOptions(TypedDict, total=False):
    """The options of ``hf.minimize`` that it does not name itself."""

    topology: Topology
    mixing: GivenMixing
    aggregation: GivenAggregation
    attack: GivenAttack
    cohort: Cohort
    graph_every: Count | None
    compute: Any
    links: Any
    redraw_every: Count | None
    link_draws: LinkDraws


class TrainOptions(ObjectiveOptions, NetworkOptions, total=False):
    """The options of ``hf.train`` that it does not name itself."""

    local_epochs: Count | None
    checkpoint_every: Count
    evaluate_every: Cadence
    metrics: GivenMetrics
    personalize: Whole
    dtype: NumberType
    precision: Precision
    channel: GivenChannel
    loss: GivenLoss
    nodes: Count
    partition: GivenPartition
    test: GivenTests
    augment: GivenAugment
    step: GivenStep
