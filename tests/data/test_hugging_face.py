"""Data sets of Hugging Face, by the library itself where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf

datasets = pytest.importorskip("datasets")


def sentences(count: int, length: int | None = 6) -> Any:
    lengths = [length or 1 + i % 5 for i in range(count)]
    return datasets.Dataset.from_dict(
        {
            "input": [[(i + k) % 7 for k in range(lengths[i])] for i in range(count)],
            "label": [i % 2 for i in range(count)],
        }
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(18, 2))


def test_columns_are_dictionary_batches() -> None:
    nodes = [sentences(count).with_format("torch") for count in (8, 11)]
    data = hf.from_datasets(nodes)
    assert isinstance(data, hf.FederatedData)
    assert torch.equal(data.node(1)["input"], nodes[1][:]["input"])
    runs = [
        hf.train(hf.FedAvg(lr=0.3), model=model(), data=given, rounds=10, batch_size=4, seed=2)
        for given in (nodes, data, hf.from_datasets(nodes, streaming=True))
    ]
    assert runs[0].history["train_loss"][-1] < runs[0].history["train_loss"][0]
    assert torch.equal(runs[0].models, runs[1].models)
    assert torch.equal(runs[0].models, runs[2].models)


def test_a_random_transform_is_drawn_anew() -> None:
    def masked(columns: dict[str, Any]) -> dict[str, Any]:
        words = torch.tensor(columns["input"])
        return {"input": words * (torch.rand(words.shape) < 0.8), "label": columns["label"]}

    data = hf.from_datasets([sentences(9).with_transform(masked)])
    assert data.how == "items read when they are drawn, as they are drawn at random"
    problems = [hf.build_problem(model(), data, batch_size=4) for _ in range(2)]
    first, again = (problem.source.batch(torch.arange(1), 1, 2).samples["input"] for problem in problems)
    assert torch.equal(first, again)


def test_different_lengths_need_a_collate_fn() -> None:
    def padded(items: list[Any]) -> dict[str, Tensor]:
        words = torch.zeros(len(items), 6, dtype=torch.int64)
        for row, item in zip(words, items, strict=True):
            row[: len(item["input"])] = item["input"]
        return {"input": words, "label": torch.stack([item["label"] for item in items])}

    nodes = [sentences(count, None).with_format("torch") for count in (8, 11)]
    with pytest.raises(hf.HoldfastError, match=r"node 0, 'input': .* one shape; .* give a collate_fn"):
        hf.train(hf.FedAvg(lr=0.3), model=model(), data=nodes, rounds=1)
    data = hf.from_datasets(nodes, collate_fn=padded, workers=1)
    assert len(hf.train(hf.FedAvg(lr=0.3), model=model(), data=data, rounds=2).history) == 3


def test_columns_of_words_are_named() -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(hf.HoldfastError, match="node 0, 'text': expected numbers"):
        hf.train(hf.FedAvg(lr=0.3), model=model(), data=[data], rounds=1)
