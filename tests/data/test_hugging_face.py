"""Columns of Hugging Face's data sets and partitions of flwr-datasets as the data of nodes."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf

ROWS = {"pixels": [[float(i), 1.0] for i in range(12)], "more": list(range(12)), "digit": [0, 1, 2] * 4}


class Table:
    """What is read of a data set of Hugging Face."""

    column_names = tuple(ROWS)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> dict[str, object]:
        return {name: column[row] for name, column in ROWS.items()}


def test_columns_are_chosen_by_name() -> None:
    pairs = hf.select_columns(Table(), x="pixels", y="digit", transform=lambda x: torch.tensor(x) / 2)
    assert len(pairs) == 12
    x, y = pairs[3]
    assert (x.tolist(), y) == ([1.5, 0.5], 0)
    several = hf.select_columns(Table(), x=["pixels", "more"], y="digit")
    assert several[3] == ({"pixels": [3.0, 1.0], "more": 3}, 0)
    with pytest.raises(hf.HoldfastError, match="did you mean 'digit'"):
        hf.select_columns(Table(), x="pixels", y="digits")


def test_partitions_of_flower_are_the_nodes() -> None:
    datasets = pytest.importorskip("datasets", reason="needs flwr-datasets: see CONTRIBUTING.md")
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="needs flwr-datasets")
    source = partitioners.PathologicalPartitioner(3, partition_by="digit", num_classes_per_partition=1)
    source.dataset = datasets.Dataset.from_dict(ROWS)
    data = hf.from_partitioner(source, x="pixels", y="digit")
    for i in range(3):
        part = source.load_partition(i)
        assert len(set(part["digit"])) == 1
        assert data.node(i).y.tolist() == list(part["digit"])
        assert data.node(i).x.tolist() == list(part["pixels"])
    model = torch.nn.Linear(2, 3)
    result = hf.train(hf.SCAFFOLD(lr=0.01), model=model, data=data, rounds=2, progress=False)
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]
    with pytest.raises(hf.HoldfastError, match="got list"):
        hf.from_partitioner([1], x="pixels", y="digit")


def test_a_federated_dataset_of_flower(tmp_path: object) -> None:
    datasets = pytest.importorskip("datasets", reason="needs flwr-datasets: see CONTRIBUTING.md")
    flower = pytest.importorskip("flwr_datasets", reason="needs flwr-datasets")
    file = f"{tmp_path}/rows.parquet"
    datasets.Dataset.from_dict(ROWS).to_parquet(file)
    source = flower.FederatedDataset(
        dataset="parquet", partitioners={"train": 4}, data_files={"train": file}, shuffle=False
    )
    data = hf.from_partitioner(source, x=["pixels"], y="digit", transform=lambda x: torch.tensor(x["pixels"]))
    assert data.counts.tolist() == [3, 3, 3, 3]
    assert data.node(1).x[:, 0].tolist() == [3.0, 4.0, 5.0]
