"""A model of several inputs with a training step of its own, and sentences of nodes that differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, TAGS, LENGTH = 7, 4, 6


class Tagger(nn.Module):
    """Scores [B, T, 4] of tokens; masked ones count as token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(TOKENS, 3), nn.Linear(3, TAGS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.score(self.embed(input_ids * attention_mask))}

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self(batch["input_ids"], batch["attention_mask"])["logits"]
        return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def sentences(node: int) -> dict[str, Tensor]:
    """Of one node: its own words, and labels of which every third is ignored."""
    draw = torch.Generator().manual_seed(node)
    count = 8 + node
    words = torch.randint(TOKENS, (count, LENGTH), generator=draw)
    labels = (words + node) % TAGS
    labels[:, ::3] = -100
    return {"input_ids": words, "attention_mask": (words > 1).long(), "labels": labels}
