"""LoRA on a frozen language model: tokens/s of a PEFT loop over clients and of holdfast, in one run.

python benchmarks/lora.py [--device cuda] [--tiny] [--profile] [--output table.json]

The model has random weights, so nothing is downloaded. One client alone is also compared, step by step, with
the ``Trainer`` of the transformers library. Needs ``pip install 'holdfast[peft]'`` and accelerate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

LR = 1e-3


@dataclass(frozen=True)
class Size:
    """Clients with batches of ``batch`` sequences of ``length`` tokens, ``steps`` of them in a round."""

    nodes: int = 8
    batch: int = 4
    length: int = 512
    steps: int = 4
    vocabulary: int = 32_000
    hidden: int = 896
    inner: int = 4864
    layers: int = 24
    heads: int = 14
    rank: int = 16
    samples: int = 64  # of a node

    @property
    def tokens(self) -> int:
        """Of all nodes in a round."""
        return self.nodes * self.batch * self.length * self.steps


TINY = Size(3, 2, 16, 2, vocabulary=50, hidden=32, inner=64, layers=2, heads=4, rank=4, samples=8)


def peft_model(size: Size, device: str) -> PeftModel:
    """A Qwen2 of random weights in bfloat16 with float32 adapters on the attention's projections."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=2,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        body = Qwen2ForCausalLM(config).to(torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=targets, lora_dropout=0.0)
    return get_peft_model(body, lora).train()


def texts(size: Size) -> list[Tensor]:
    """Random tokens of every node, [samples, length]; nodes differ in which tokens are frequent."""
    draw = torch.Generator().manual_seed(0)
    shape = (size.samples, size.length)
    return [
        (torch.rand(shape, generator=draw) ** (1 + node) * size.vocabulary).long()
        for node in range(size.nodes)
    ]


def peft_loop(size: Size, device: str) -> Callable[[], None]:
    """A round of FedAvg as one writes it with PEFT: every client in turn takes the adapter and trains it."""
    model, data = peft_model(size, device), [text.to(device) for text in texts(size)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    server = [parameter.detach().clone() for parameter in trained]

    def round() -> None:
        total = [torch.zeros_like(parameter) for parameter in server]
        for node in range(size.nodes):
            with torch.no_grad():
                torch._foreach_copy_(trained, server)
            optimizer = torch.optim.SGD(trained, lr=LR)
            for _ in range(size.steps):
                batch = data[node][torch.randint(size.samples, (size.batch,), device=device)]
                optimizer.zero_grad()
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
            torch._foreach_add_(total, [parameter.detach() for parameter in trained])
        for mean, sum_ in zip(server, total, strict=True):
            mean.copy_(sum_ / size.nodes)

    return round


def trainer_losses(size: Size, device: str, batches: list[Tensor]) -> list[float]:
    """The losses that the ``Trainer`` reports for these batches, one after the other, with plain SGD."""
    rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch.cpu()]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size.batch,
            max_steps=len(batches),
            optim="sgd",
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = _InOrder(peft_model(size, device), settings, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class _InOrder(Trainer):
    """Takes samples in their order."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.SequentialSampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)
