"""The processes that carry out a run together. Most runs have only one; then every sum is already whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class World:
    """This process and the others: here, a process on its own. Every method is called by all of them."""

    rank: int = 0
    size: int = 1
    on_this_machine: int = 1  # how many of them share this machine's memory

    @property
    def leads(self) -> bool:
        """Whether this process writes the run directory and talks to the user."""
        return self.rank == 0

    def own_device(self, device: str) -> str:
        """The device of this process where ``device`` is asked for."""
        return device

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' ``part``, the same bits for all."""
        return part

    def mean(self, rows: Tensor, total: int) -> Tensor:
        """The sum [...] of all processes' ``rows`` [m, ...] over ``total``, mostly the number of them all."""
        return rows.mean(0) if len(rows) == total else rows.sum(0) / total

    def lowest(self, part: Tensor) -> Tensor:
        """The least of all processes' ``part``, element by element."""
        return part

    def any(self, flag: bool) -> bool:
        """Whether anybody's ``flag`` is set."""
        return flag

    def of_leader(self, tensor: Tensor) -> Tensor:
        """The leader's ``tensor``; the others' are of the same shape."""
        return tensor

    def text_of_leader(self, make: Callable[[], str]) -> str:
        """What ``make`` returns to the leader, who alone calls it; a ``HoldfastError`` is raised by all."""
        return make()

    def raise_on_all(self, work: Callable[[], T]) -> T:
        """``work``, done by all processes; a ``HoldfastError`` of any of them is raised by all."""
        return work()

    def agree(self, what: str, own: str, remedy: str) -> None:
        """Raises a ``HoldfastError`` everywhere unless ``own`` is the same in all processes."""

    def wait(self) -> None:
        """Returns when all processes are here."""


ALONE = World()
