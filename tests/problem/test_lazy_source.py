"""Data sets that are read when drawn: transforms anew in every batch, the same wherever and whenever."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import holdfast as hf
from holdfast.core.tree import leaves
from holdfast.data.lazy import LazyData, Part
from holdfast.data.samples import as_tree
from holdfast.problem.lazy_source import LazySource, Schedule
from holdfast.problem.source import ArraySource

DRAW = torch.Generator().manual_seed(0)
COUNTS = [5, 9, 6]
NODES = torch.arange(3)
LIKE = torch.zeros((), dtype=torch.float64)


class Noisy(Dataset):
    """Items with noise from all three global generators."""

    def __init__(self, count: int, scale: float = 1.0) -> None:
        self.x = torch.arange(4.0 * count).view(count, 4)
        self.scale, self.reads = scale, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.reads += 1
        noise = torch.randn(4) + float(np.random.randn()) + random.random()
        return self.x[i] + self.scale * noise, i % 2


class Plain(Noisy):
    """The same items without any noise."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.x[i], i % 2


def source_of(kind: type[Noisy] = Noisy, workers: int = 0, **options: Any) -> LazySource:
    data = LazyData([kind(count) for count in COUNTS], workers=workers)
    if (held := options.pop("held", None)) is not None:
        data = data.hold(held)
    return LazySource(data, LIKE, seed=3, **{"batch_size": 4, **options})


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize("sampling", ["replacement", "epochs", "poisson"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_plain_items_are_what_samples_in_memory_are(sampling, weights) -> None:
    """Every batch of the protocol, item by item and weight by weight."""
    options: Any = {"batch_size": 4, "sampling": sampling, "weights": weights, "mean": 0.5, "std": 2.0}
    lazy = source_of(Plain, **options)
    memory = ArraySource(hf.FederatedData.of_nodes([Plain(c) for c in COUNTS]), LIKE, seed=3, **options)
    for round, step in ((0, 0), (0, 1), (0, 3), (5, 2)):
        for nodes in (NODES, torch.tensor([2, 0])):
            assert same(lazy.batch(nodes, round, step), memory.batch(nodes, round, step))
    for nodes in (NODES, torch.tensor([1])):
        for one, other in zip(lazy.all_of(nodes, 7), memory.all_of(nodes, 7), strict=True):
            assert same(one, other)
    whole = [torch.cat(parts) for parts in zip(*map(leaves, lazy.everything(4)), strict=True)]
    assert same(whole, next(memory.everything(100)))
    assert same(lazy.some(3), memory.some(3))
    assert lazy.samples(NODES) == memory.samples(NODES) == 20
    assert (lazy.draws.width, lazy.draws.padded) == (memory.draws.width, memory.draws.padded)
    assert lazy.in_dtype(torch.float32).batch(NODES, 0, 0).samples.x.dtype == torch.float32
    assert lazy.identity() is None
    test = (torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))
    assert same(
        next(lazy.input_transform.in_parts(lazy.test_set(as_tree("test", test)), 2)),
        next(memory.input_transform.in_parts(memory.test_set(as_tree("test", test)), 2)),
    )


def test_transforms_are_drawn_anew_and_from_counters() -> None:
    one, other = source_of(), source_of()
    torch.manual_seed(9)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    first = one.batch(NODES, 2, 1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    torch.manual_seed(4)
    random.seed(4)
    other.batch(NODES, 0, 0)
    assert same(first, other.batch(NODES, 2, 1))  # whatever was drawn before
    alone = source_of(held=[1]).batch(torch.tensor([1]), 2, 1)
    assert torch.equal(alone.samples.x[0], first.samples.x[1])  # whoever else is asked
    noise = first.samples.x - first.samples.x.round()
    again = one.batch(NODES, 2, 2)
    assert not torch.equal(noise, again.samples.x - again.samples.x.round())
    # A sample that occurs twice in a batch is transformed twice.
    twice = LazyData([Noisy(1)]).read(Part(0, 0, 0, (0, 0), ((1, 2, 3, 4),), 2))
    assert not torch.equal(twice.x[0], twice.x[1])


def test_evaluation_reads_one_fixed_draw_however_it_is_cut() -> None:
    source = source_of()
    parts = [torch.cat([b.samples.x for b in source.everything(size)]) for size in (2, 3, 100)]
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])
    rows = torch.cat([b.samples.x[1] for b in source.all_of(NODES, 6)])
    assert torch.equal(rows[:9], parts[0][5:14])


@pytest.mark.parametrize("sampling", ["replacement", "epochs"])
def test_workers_give_the_same_numbers_and_read_ahead(sampling) -> None:
    here, there = source_of(sampling=sampling), source_of(workers=2, sampling=sampling)
    for round in range(3):
        for step in range(3):
            assert same(here.batch(NODES, round, step), there.batch(NODES, round, step))
            ahead = {(part.round, part.step) for group in there.reader._ahead for part in group}
            known = round > 0  # the first round tells how many steps there are
            assert ahead == {(round + 1, 0) if known and step == 2 else (round, step + 1)}
    assert same(list(here.everything(5)), list(there.everything(5)))
    assert same(list(here.all_of(NODES, 5)), list(there.all_of(NODES, 5)))


def test_a_schedule_is_learnt_from_the_last_round() -> None:
    schedule = Schedule()
    asked = [(0, 2**31), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    following = [schedule.after(*step) for step in asked]
    assert following[1:] == [(0, 1), (0, 2), (1, 1), (2, 0), (2, 1)]


def train(data: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    method = hf.FedAvg(lr=options.pop("lr", 0.01), local_steps=2)
    options = {"rounds": 3, "batch_size": 3, "dtype": "float64", "seed": 5, **options}
    return hf.train(method, model=nn.Linear(4, 2), data=data, **options)


def test_train_reads_what_stays_the_same_once() -> None:
    parts = [Plain(count) for count in COUNTS]
    data = hf.from_datasets(parts)
    assert isinstance(data, hf.FederatedData)
    assert "read once into memory" in data.description
    reads = [part.reads for part in parts]
    assert torch.equal(train(data).models, train(hf.from_datasets(parts, streaming=True)).models)
    assert torch.equal(train(data).models, train(parts).models)
    assert reads != [part.reads for part in parts]


def test_train_draws_random_transforms_anew(recwarn) -> None:
    parts = [Noisy(count) for count in COUNTS]
    data = hf.from_datasets(parts)
    assert isinstance(data, LazyData)
    assert data.description == "items read when they are drawn, as they are drawn at random"
    assert torch.equal(train(parts).models, train(hf.from_datasets(parts, workers=2)).models)
    problem = hf.build_problem(nn.Linear(4, 2), data)
    assert problem.description == f"all nodes stacked; {data.description}"
    assert not [one for one in recwarn if "fork()" not in str(one.message)]  # of which Python 3.12 warns


def test_random_numbers_that_rarely_show_are_noticed() -> None:
    class Rarely(Noisy):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return self.x[i] + (random.random() < 0 if i > 10 else 0), i % 2

    data = hf.from_datasets([Rarely(30)])
    assert data.description.endswith("as they are drawn at random")


def test_a_generator_of_its_own_is_told() -> None:
    class Own(Noisy):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.generator = torch.Generator().manual_seed(0)

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return self.x[i] + torch.randn(4, generator=self.generator), i % 2

    with pytest.warns(UserWarning, match="node 1: items of the Dataset differ .* generator of their own"):
        hf.from_datasets([Noisy(4), Own(5)])


def test_resume_sees_the_same_transforms() -> None:
    def simulation() -> Any:
        torch.manual_seed(0)
        data = hf.from_datasets([Noisy(count) for count in COUNTS])
        problem = hf.build_problem(nn.Linear(4, 2), data, batch_size=3, dtype=torch.float64)
        return hf.Simulation(hf.LocalGECL(lr=0.01, local_steps=2), problem, hf.Network.of(hf.ring(3)))

    whole, half, resumed = simulation(), simulation(), simulation()
    for _ in range(4):
        whole.step()
    for _ in range(2):
        half.step()
    resumed.restore(*half.snapshot())
    for _ in range(2):
        resumed.step()
    assert torch.equal(whole.models, resumed.models)


def test_a_run_in_a_folder_is_resumed_with_other_workers_but_not_with_other_data(tmp_path) -> None:
    data = [hf.from_datasets([Noisy(5), Noisy(9, scale)], workers=workers) for scale, workers in DATA]
    first, again = (train(data[i], run_dir=tmp_path / "run", resume=i > 0) for i in range(2))
    assert torch.equal(first.models, again.models)
    with pytest.raises(hf.HoldfastError, match="data"):
        train(data[2], run_dir=tmp_path / "run", resume=True)


DATA = ((1.0, 0), (1.0, 1), (2.0, 0))  # scale of the noise, workers


class Mapped(Dataset):
    """Rows of a file on disk, of which only those that are asked for are read."""

    def __init__(self, path: Any) -> None:
        self.rows, self.asked = np.load(path, mmap_mode="r"), set()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.asked.add(i)
        return np.array(self.rows[i]), i % 2


def test_what_is_larger_than_memory_is_not_read_whole(tmp_path, monkeypatch) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((4000, 4)).astype(np.float32))
    monkeypatch.setattr("holdfast.data.per_node.available_memory", lambda _: 2**17)
    part = Mapped(tmp_path / "rows.npy")
    data = hf.from_datasets([Subset(part, range(2000)), Subset(part, range(2000, 4000))])
    assert data.description == "items read when they are drawn, as they are too many for the memory"
    train(data, metrics=["consensus"])
    assert len(part.asked) < 400
    streamed = Mapped(tmp_path / "rows.npy")
    train(hf.from_datasets([streamed], streaming=True), metrics=["consensus"], run_dir=tmp_path / "run")
    assert len(streamed.asked) < 200


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sentences of up to 6 words, padded with word 0."""
    words = torch.zeros(len(items), 6, dtype=torch.int64)
    for row, item in zip(words, items, strict=True):
        row[: len(item["words"])] = torch.tensor(item["words"])
    return {"input": words, "labels": torch.tensor([item["label"] for item in items])}


class Sentences:
    """Not a torch Dataset, but with a length and items, as those of Hugging Face."""

    def __init__(self, count: int) -> None:
        self.items = [{"words": [1 + k % 5 for k in range(1 + i % 6)], "label": i % 2} for i in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.items[i]


def test_items_of_different_lengths_are_collated() -> None:
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(18, 2))
    data = hf.from_datasets([Sentences(8), Sentences(11)], collate_fn=padded)
    result = hf.train(hf.FedAvg(lr=0.1), model=model, data=data, rounds=30, batch_size=4)
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]
    with pytest.raises(hf.HoldfastError, match=r"node 0, 'words': the items are not .* give a collate_fn"):
        hf.from_datasets([Sentences(8)], streaming=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_padded_to_different_lengths_are_refused(workers) -> None:
    def to_the_longest(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        columns, longest = padded(items), max(len(item["words"]) for item in items)
        return {**columns, "input": columns["input"][:, :longest]}

    data = LazyData([Sentences(2), Sentences(12)], to_the_longest, workers)
    source = LazySource(data, LIKE, batch_size=6)
    with pytest.raises(hf.HoldfastError, match=r"input torch.int64 .* pad all batches to one shape"):
        source.batch(torch.arange(2), 0, 0)


class Broken(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i > 2:
            raise OSError(f"file {i} is gone")
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_raises_names_the_node(workers) -> None:
    data = LazyData([Noisy(3), Broken(8)], workers=workers)
    with pytest.raises(hf.HoldfastError, match=r"node 1: reading items .* fails: OSError: file \d is gone"):
        list(LazySource(data, LIKE).everything(100))


def test_pairs_beside_datasets() -> None:
    x, y = torch.randn(6, 4, generator=DRAW), torch.arange(6) % 2
    data = hf.from_datasets([(x, y), Noisy(5)])
    assert isinstance(data, LazyData)
    assert torch.equal(next(LazySource(data, LIKE).everything(6)).samples.x, x.double())
    assert isinstance(hf.from_datasets([(x, y), TensorDataset(x, y)]), hf.FederatedData)


# --- streams -------------------------------------------------------------------------------------------


def endless(node: int, round: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4) + 0.1 * node
    return x, (x[:, 0] > 0).long()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_node_round_and_step_trains(workers) -> None:
    torch.manual_seed(0)
    test = endless(0, 0, 0)
    stream = hf.Stream(nodes=3, batch=endless, workers=workers)
    result = train(stream, rounds=30, lr=0.5, test=test)
    assert set(result.history.rows[0]) >= {"test_accuracy", "consensus"}
    assert "train_loss" not in result.history.rows[0]
    assert result.history["average_loss"][-1] < 0.9 * result.history["average_loss"][0]
    assert torch.equal(result.models, train(hf.Stream(nodes=3, batch=endless), rounds=30, lr=0.5).models)


def test_what_a_stream_cannot_do() -> None:
    stream = hf.Stream(nodes=2, batch=endless)
    with pytest.raises(hf.HoldfastError, match="'train_loss' needs training samples that come to an end"):
        train(stream, metrics=["train_loss"])
    with pytest.raises(hf.HoldfastError, match="a Stream has no end"):
        train(stream, batch_size="full")
    with pytest.raises(hf.HoldfastError, match="sampling = 'epochs': a Stream has no samples"):
        train(stream, sampling="epochs")
    problem = hf.build_problem(nn.Linear(4, 2), stream)
    with pytest.raises(hf.HoldfastError, match="a Stream has no end, so what reads all"):
        problem.full_grads(problem.x0.expand(2, -1), torch.arange(2))
    sizes = hf.Stream(nodes=2, batch=lambda node, round, step: tuple(t[: 8 - step] for t in endless(0, 0, 0)))
    with pytest.raises(hf.HoldfastError, match="node 0: a batch has 7 samples; expected 8"):
        train(sizes)


def test_islice_of_batches_is_lazy() -> None:
    source = source_of(Plain)
    next(islice(source.everything(2), 1))
    assert source.data.datasets[0].reads == 2
