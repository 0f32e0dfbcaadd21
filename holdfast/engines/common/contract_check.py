"""Whether a method, its optimisers and its channel keep the contract: they are tried on the zero problem.

A mistake is named in one line: the class and the function, what it gave, what was expected, what to do.
Without this it would fail deep in an engine, or pass silently. A trial has sizes of its own, so that messages
can say [m, d] for m nodes and models of d numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Algorithm, Channel, LocalOptimizer, Method, ServerAlgorithm
from holdfast.contract.channel import Draw
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import quoted
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.engines.common.trial import Flip, RecordingPeers, ZeroProblem
from holdfast.topology import Network

# --- what trees of tensors should look like, and one-line errors for those that do not ------------------


ROWS = 2
IN_ROWS = "a tensor [m, d] with one row per node, a number per node as [m, 1]"


@dataclass(frozen=True)
class Expected:
    """Checks what a function gave for ``ROWS`` nodes and models of ``dim`` numbers, [m, d] in messages.

    ``where`` names the function and ``what`` the thing that it gave.
    """

    dim: int

    def rows(self, where: str, what: str, tree: Any, of_links: int = ROWS) -> None:
        """Raises unless the first dimension of all tensors counts nodes, or all their links."""
        self.tensors(where, what, tree, IN_ROWS, lambda t: t.ndim > 1 and len(t) in (ROWS, of_links))

    def message(self, where: str, message: Any) -> None:
        """Raises unless all tensors are [m, ...] with rows that are vectors."""
        self.tensors(where, "the message", message, IN_ROWS, lambda t: t.ndim == 2 and len(t) == ROWS)

    def tensors(
        self, where: str, what: str, tree: Any, expected: str, fits: Callable[[Tensor], bool]
    ) -> None:
        """Raises unless ``tree`` holds nothing but tensors that fit."""
        for name, part in parts(tree):
            if not isinstance(part, Tensor) or not fits(part):
                remedy = "reshape it" if isinstance(part, Tensor) else "put tensors into a NamedTuple"
                if part is None:
                    remedy = "return a tensor, or leave it out"
                raise HoldfastError(
                    f"{where}: {_named(what, name)} is {self.form(part)}, expected {expected}; {remedy}"
                )

    def alike(self, where: str, what: str, given: Any, like: Any, source: str) -> None:
        """Raises unless ``given`` has the structure, shapes and number types of ``like``."""
        if _structure(given) != _structure(like):
            raise HoldfastError(
                f"{where}: {what} is {self.form(given)}, {source} {self.form(like)}; return the same parts"
            )
        for (name, own), (_, other) in zip(parts(given), parts(like), strict=True):
            if (own.shape, own.dtype) != (other.shape, other.dtype):
                remedy = "keep the shape" if own.shape != other.shape else "keep the number type, with .to(x)"
                was, should = self.form(own), self.form(other)
                raise HoldfastError(f"{where}: {_named(what, name)} is {was}, {source} {should}; {remedy}")

    def pair(self, where: str, given: Any, expected: str) -> tuple[Any, Any]:
        """The two things that were ``given``."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise HoldfastError(f"{where}: it returned {self.form(given)}, expected two things: {expected}")
        return given

    def form(self, value: Any) -> str:
        """``value`` for people: ``a float32 tensor [m, d]``, ``Node(x, c)``."""
        if isinstance(value, Tensor):
            sizes = ["d" if size == self.dim else str(size) for size in value.shape]
            if value.ndim and value.shape[0] == ROWS:
                sizes[0] = "m"
            kind = str(value.dtype).removeprefix("torch.")
            return f"{'an' if kind[0] == 'i' else 'a'} {kind} tensor [{', '.join(sizes)}]"
        if isinstance(value, tuple | dict):
            return f"{type(value).__name__}({', '.join(_names(value))})"
        return quoted(value)


def parts(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All that is in ``tree``, tensors or not, with dotted names."""
    if isinstance(tree, tuple | dict):
        for name, part in zip(_names(tree), tree.values() if isinstance(tree, dict) else tree, strict=True):
            yield from parts(part, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, tree


def _names(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [str(key) for key in tree]
    return list(getattr(tree, "_fields", map(str, range(len(tree)))))


def _structure(tree: Any) -> Any:
    if isinstance(tree, tuple | dict):
        inner = tree.values() if isinstance(tree, dict) else tree
        return type(tree), _names(tree), [_structure(part) for part in inner]
    return Tensor if isinstance(tree, Tensor) else type(tree)


def _named(what: str, name: str) -> str:
    return f"{what}'s {name!r}" if name else what


# --- whether a method, its optimisers and its channel keep the contract ---------------------------------


DIM = 11
OF_SERVER = "a tensor [d], a single number as [1]"


def check_method(method: Method, network: Network) -> list[Any]:
    """Tries ``method`` and its optimisers; the messages of a round, each with ``ROWS`` rows.

    There is a trial for each number type. Shared coins fall this way and that in turn, beginning differently.
    A solver may be asked for more than float32 can give, so methods with one are tried in float64 only.
    """
    expected = _expected(method)
    _check_optimizers(expected, method.at(0))
    _try(
        expected,
        method,
        network,
        torch.float64 if method.capabilities.uses_solver else torch.float32,
        heads=False,
    )
    return _try(expected, method, network, torch.float64, heads=True)


def check_channel(channel: Channel, method: Method, network: Network, messages: list[Any]) -> None:
    """Sends ``messages`` of ``method`` through ``channel`` and looks at all that it returns."""
    name, leads, expected = type(channel).__name__, isinstance(method, ServerAlgorithm), _expected(method)
    for message in messages:
        sender, receiver = channel.init(message), channel.init_receiver(message)
        expected.rows(f"{name}.init", "the state", sender)
        expected.rows(f"{name}.init_receiver", "the state", receiver)
        arrived = _through(expected, channel, message, sender)
        later = channel.update(message, arrived, sender)
        expected.alike(f"{name}.update", "the state", later, sender, "init gave")
        if leads:
            mean, receiver = _first_row(arrived), _first_row(receiver)
            where, given = f"{name}.gather", channel.gather(mean, receiver, 1.0)
        else:
            mean, where = arrived, f"{name}.average" if network.is_server else f"{name}.combine"
            receive = channel.average if network.is_server else channel.combine
            given = receive(message, arrived, mean, later, receiver)
        seen, kept = expected.pair(
            where, given, "the message as the method sees it, and the receiver's state"
        )
        expected.alike(where, "the message", seen, mean, "it was given")
        expected.alike(where, "the state", kept, receiver, "init_receiver gave")
        if network.is_server and not channel.down.transparent:
            _through(expected, channel.down, tree_map(lambda t: t[:1], message), ())


def _expected(method: Method) -> Expected:
    """For models of a size that no other number of a trial has, if the method can do with it."""
    return Expected(max(DIM, method.capabilities.least_dim))


def _try(expected: Expected, method: Method, network: Network, dtype: torch.dtype, heads: bool) -> list[Any]:
    x0 = torch.zeros(expected.dim, dtype=dtype)
    if isinstance(method, ServerAlgorithm):
        return [_try_server(expected, method.at(0), network, x0)]
    assert isinstance(method, Algorithm)
    return _try_nodes(expected, method.at(0), network, x0, heads)


def _try_nodes(expected: Expected, method: Algorithm, network: Network, x0: Tensor, heads: bool) -> list[Any]:
    name, rows = type(method).__name__, x0.expand(ROWS, -1)
    start, peers = (RecordingPeers(network.at(0), 0, x0, _coins(heads), rows=ROWS) for _ in range(2))
    of_links = ROWS * start.links
    before = method.init(rows.clone(), _oracle(network, expected.dim), start)
    expected.rows(f"{name}.init", "the state", before, of_links)
    after = method.round(before, _oracle(network, expected.dim), peers)
    expected.rows(f"{name}.round", "the state", after, of_links)
    expected.alike(f"{name}.round", "the state", after, before, "init gave")
    for function, sent in (("init", start.sent), ("round", peers.sent)):
        for message in sent:
            expected.message(f"{name}.{function}", message)
    expected.alike(f"{name}.model", "the model", method.model(after), rows, "expected")
    _check_optional(expected, method, after, rows)
    return peers.sent


def _try_server(expected: Expected, method: ServerAlgorithm[Any], network: Network, x0: Tensor) -> Any:
    name, rows = type(method).__name__, x0.expand(ROWS, -1)
    clients, server = method.init(rows.clone()), method.init_server(x0.clone())
    expected.rows(f"{name}.init", "the state", clients)
    expected.tensors(f"{name}.init_server", "the state", server, OF_SERVER, lambda t: t.ndim > 0)
    received = method.broadcast(server)
    expected.tensors(f"{name}.broadcast", "the message", received, OF_SERVER, lambda t: t.ndim > 0)
    oracle = _oracle(network, expected.dim)
    given = method.client(clients, received, oracle)
    after, message = expected.pair(
        f"{name}.client", given, "the client's new state and its message to the server"
    )
    expected.rows(f"{name}.client", "the state", after)
    expected.alike(f"{name}.client", "the state", after, clients, "init gave")
    expected.message(f"{name}.client", message)
    later = method.server(server, _first_row(message), 1.0)
    expected.alike(f"{name}.server", "the state", later, server, "init_server gave")
    expected.alike(f"{name}.model", "the model", method.model(later), x0, "expected")
    answer = method.answer(later)
    expected.tensors(f"{name}.answer", "the message", answer, OF_SERVER, lambda t: t.ndim > 0)
    finished = method.finish(after, message, answer, oracle)
    expected.alike(f"{name}.finish", "the state", finished, clients, "init gave")
    _check_optional(expected, method, finished, rows)
    return message


def _check_optional(expected: Expected, method: Method, nodes: Any, rows: Tensor) -> None:
    """What a method may say of the state of its nodes: None, or a row for each."""
    for function, what in ((method.dual, "the dual"), (method.personal, "the personal model")):
        if (given := function(nodes)) is not None:
            where = f"{type(method).__name__}.{function.__name__}"
            expected.alike(where, what, given, rows, "expected None or")


def _check_optimizers(expected: Expected, holder: object) -> None:
    """Those among the parameters of ``holder``, and those among theirs."""
    for part in vars(holder).values():
        if isinstance(part, LocalOptimizer):
            _check_optimizers(expected, part)
            _try_optimizer(expected, part)


def _try_optimizer(expected: Expected, optimizer: LocalOptimizer) -> None:
    name, x = type(optimizer).__name__, torch.zeros(ROWS, expected.dim, dtype=torch.float64)
    memory = optimizer.init(x)
    expected.rows(f"{name}.init", "the memory", memory)
    given = optimizer.update(torch.zeros_like(x), memory, x)
    direction, later = expected.pair(
        f"{name}.update", given, "the direction of the step and the memory after it"
    )
    expected.alike(f"{name}.update", "the direction", direction, x, "expected, like x,")
    expected.alike(f"{name}.update", "the memory", later, memory, "init gave")


def _through(expected: Expected, channel: Channel, message: Any, state: Any) -> Any:
    name = type(channel).__name__
    draw = Draw(0, 0, 0, torch.zeros(len(next(leaves(message))), dtype=torch.int64))
    wire = channel.encode(message, state, draw)
    form = "a tensor [m, ...] with one row per sender"
    rows = len(draw.nodes)
    expected.tensors(f"{name}.encode", "the wire", wire, form, lambda t: t.ndim > 1 and len(t) == rows)
    arrived = channel.decode(wire, message)
    expected.alike(f"{name}.decode", "the message", arrived, message, "encode was given")
    return arrived


def _coins(heads: bool) -> Flip:
    """Whatever their probability; a method may go on until one falls as it wants."""
    sides = cycle([heads, not heads])
    return lambda probability: next(sides)


def _oracle(network: Network, dim: int) -> BatchOracle:
    nodes = torch.zeros(ROWS, dtype=torch.int64)
    return BatchOracle(ZeroProblem(network.nodes, dim), nodes, 0, 0, Work())


def _first_row(tree: Any) -> Any:
    return tree_map(lambda t: t[0], tree)
