"""The ranks of a ``torch.distributed`` process group, as torchrun starts them.

Texts travel as bytes in tensors: nothing is ever unpickled. Flags and texts go over gloo on the host, so that
a GPU's queue is not emptied for them; tensors go where they live, NCCL on GPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from holdfast.core.errors import HoldfastError
from holdfast.core.world import ALONE, World

T = TypeVar("T")

# Every collective, the first meeting included, gives up after this time: nothing waits for ever for a rank
# that is gone.
LIMIT = timedelta(minutes=10)

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
LEADER = 0


class AgreedError(HoldfastError):
    """An error that all ranks raise at the same place, so that one of them need tell the user."""


class ContactLost(Exception):  # noqa: N818 - the error is another rank's
    """A collective failed, most likely since another rank is gone."""


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Around everything that waits for other ranks."""
    try:
        yield
    except RuntimeError as error:
        # "[file.cc:553] Connection closed by peer [address]. This is typically ..."
        raise ContactLost(re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0].split(". ")[0]) from None


class Ranks(World):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def own_device(self, device: str) -> str:
        """Of the GPUs of a machine, each of its ranks takes one."""
        return self.raise_on_all(lambda: _own_device(device))

    def sum(self, part: Tensor) -> Tensor:
        return self._reduced(part, dist.ReduceOp.SUM)

    def mean(self, rows: Tensor, total: int) -> Tensor:
        return self.sum(rows.sum(0)) / total

    def lowest(self, part: Tensor) -> Tensor:
        return self._reduced(part, dist.ReduceOp.MIN)

    def any(self, flag: bool) -> bool:
        return bool(self._reduced(torch.tensor(int(flag)), dist.ReduceOp.MAX))

    def of_leader(self, tensor: Tensor) -> Tensor:
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        with collective():
            dist.broadcast(received, LEADER)
        return received

    def text_of_leader(self, make: Callable[[], str]) -> str:
        return self.texts(self.raise_on_all(lambda: make() if self.leads else ""))[LEADER]

    def raise_on_all(self, work: Callable[[], T]) -> T:
        failure = ""
        try:
            result = work()
        except HoldfastError as error:
            failure = str(error)
        self.raise_alike(failure)
        return result

    def raise_alike(self, failure: str) -> None:
        """Raises the same error on every rank if any of them brings a ``failure``, not empty."""
        if not self.any(bool(failure)):
            return
        failures = self.texts(failure)
        first = next(rank for rank, text in enumerate(failures) if text)
        raise AgreedError(failures[first] if first == LEADER else f"rank {first}: {failures[first]}")

    def texts(self, text: str) -> list[str]:
        """Every rank's ``text``, in the order of the ranks."""
        content = text.encode()
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        sizes = self.sum(sizes)
        padded = torch.tensor(list(content.ljust(int(sizes.max()), b" ")), dtype=torch.uint8)
        everybody = [torch.empty_like(padded) for _ in range(self.size)]
        with collective():
            dist.all_gather(everybody, padded)
        return [bytes(part.tolist())[:size].decode() for part, size in zip(everybody, sizes, strict=True)]

    def agree(self, what: str, own: str, remedy: str) -> None:
        found = self.texts(own)
        for rank, theirs in enumerate(found):
            if theirs != found[LEADER]:
                raise AgreedError(f"rank {rank} has another {what} than rank 0: {remedy}")

    def wait(self) -> None:
        self.any(False)

    @staticmethod
    def _reduced(part: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        total = part.detach().clone(memory_format=torch.contiguous_format)
        with collective():
            dist.all_reduce(total, how)
        return total


def under_torchrun() -> bool:
    """Whether this process was started as one rank of several."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The world of this process: all ranks if torchrun started it, else this process alone."""
    if not under_torchrun():
        yield ALONE
        return
    world = _meet()
    try:
        yield world
    except AgreedError as error:
        # torchrun ends all ranks as soon as one has failed: not before the leader has told the user.
        if world.leads:
            print(f"error: {error}", file=sys.stderr, flush=True)
        world.wait()
        end_group()
        sys.exit(2)
    except SystemExit:  # all ranks leave together, such as after a signal
        end_group()
        raise
    except ContactLost as error:
        print(f"rank {world.rank}: lost contact with another rank ({error})", file=sys.stderr, flush=True)
        sys.exit(1)
    except (HoldfastError, OSError, MemoryError) as error:
        raise HoldfastError(f"rank {world.rank}: {error or 'out of memory'}") from None
    end_group()


def end_group() -> None:
    """Ends the process group and its threads. A thread that still runs may abort a process that ends."""
    if dist.is_initialized():
        # With torch 2.6 and 2.7, gloo never ends if a thread still holds the last operation, which is done.
        time.sleep(0.1)
        dist.destroy_process_group()


def _meet() -> Ranks:
    if missing := [name for name in NEEDED if name not in os.environ]:
        raise HoldfastError(
            f"this process should be one rank of several, but the environment lacks {' and '.join(missing)}: "
            "start the ranks with torchrun, or unset RANK and WORLD_SIZE"
        )
    # Its functions have the default group as a default argument. Imported later, by torch's compiler, they
    # would keep the group and its threads alive after ``end_group``.
    importlib.import_module("torch.distributed.nn.functional")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://", timeout=LIMIT))
        place = PrefixStore(_new_place(store, rank, size), store)
        dist.init_process_group(backend, store=place, rank=rank, world_size=size, timeout=LIMIT)
    except (RuntimeError, ValueError) as error:
        raise HoldfastError(f"the ranks did not meet: {str(error).splitlines()[0]}") from None
    if backend == "gloo":
        # A rank that fails ends its group last, after its error was printed: the others lose contact then.
        # NCCL would first wait for ranks that may be gone.
        atexit.register(end_group)
    return Ranks()


def _new_place(store: Store, rank: int, size: int) -> str:
    """A prefix for the keys of these very processes, from the leader.

    torchrun keeps its store when it starts ranks again, with the addresses of those that are gone. So every
    rank asks under a name of its own, and what was asked by ranks before is of no consequence.
    """
    name = uuid.uuid4().hex
    if rank != LEADER:
        store.set(f"holdfast/ask/{rank}", name)
        store.wait([f"holdfast/answer/{name}"], LIMIT)
        place: str = store.get(f"holdfast/answer/{name}").decode()
        store.add(f"{place}/arrived", 1)
        return place
    deadline = time.monotonic() + LIMIT.total_seconds()
    while store.add(f"{name}/arrived", 0) < size - 1:
        for other in range(1, size):
            if store.check([f"holdfast/ask/{other}"]):
                asked = store.get(f"holdfast/ask/{other}").decode()
                store.set(f"holdfast/answer/{asked}", name)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of the {size} ranks came within {LIMIT}")
        time.sleep(0.01)
    return name


def _own_device(device: str) -> str:
    if device == "cpu":
        return device
    index, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device != "cuda":
        raise HoldfastError(
            f"device: every rank takes a GPU of its own; give 'cuda' or 'cpu', got {device!r}"
        )
    if index >= gpus:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", index + 1)
        raise HoldfastError(f"device: {ranks} ranks here need a GPU each, but torch sees {gpus}; use 'cpu'")
    torch.cuda.set_device(index)
    return f"cuda:{index}"
