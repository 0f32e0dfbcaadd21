"""LoRA on a frozen language model: tokens/s of a PEFT loop over clients and of holdfast, in one run.

python benchmarks/lora.py [--device cuda] [--tiny] [--dropout 0.05] [--profile] [--output table.json]

The model has random weights, so nothing is downloaded. Adapters are float32 on a bfloat16 model; with the
precision "bfloat16" they enter products in bfloat16, as by autocast. The ratio is to the faster of two loops,
with and without autocast. One client alone is also compared, step by step, with the ``Trainer`` of the
transformers library, with plain SGD and with AdamW. Needs ``pip install 'holdfast[peft]'``.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
from workloads import seconds

import holdfast as hf
from holdfast.core.precision import Precision
from holdfast.engines.common.simulation import Executor, Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.experiments.choices import as_network
from holdfast.experiments.setting import build_problem
from holdfast.problem.gradients.backend import no_key

LR = 0.5  # plain SGD; large enough for losses to move within a few steps
RULES: dict[str, hf.LocalOptimizer] = {  # by their names in the Trainer
    "sgd": hf.SGD(),
    "adamw_torch": hf.AdamW(weight_decay=0.01, keep=True),
}
LONG_RUN, SHORT_RUN = 10**4, 10  # rounds to prepare for: compiling pays, or not


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
    dropout: float = 0.0  # of the adapters' inputs
    adamw_lr: float = 1e-3
    body: torch.dtype = torch.bfloat16  # of the frozen model

    def lr(self, rule: str) -> float:
        """A step size for one of ``RULES``."""
        return LR if rule == "sgd" else self.adamw_lr

    @property
    def tokens(self) -> int:
        """Of all nodes in a round."""
        return self.nodes * self.batch * self.length * self.steps


TINY = Size(
    3, 2, 16, 2, vocabulary=50, hidden=32, inner=64, layers=2, heads=4, rank=4, samples=8, adamw_lr=1e-2
)


def peft_model(size: Size, device: str) -> PeftModel:
    """A Qwen2 of random, frozen weights with float32 adapters on the attention's projections."""
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
        body = Qwen2ForCausalLM(config).to(size.body)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(
        r=size.rank, lora_alpha=2 * size.rank, target_modules=targets, lora_dropout=size.dropout
    )
    return get_peft_model(body, lora).train()


def texts(size: Size) -> list[Tensor]:
    """Random tokens of every node, [samples, length]; nodes differ in which tokens are frequent."""
    draw = torch.Generator().manual_seed(0)
    shape = (size.samples, size.length)
    return [
        (torch.rand(shape, generator=draw) ** (2 + node) * size.vocabulary).long()
        for node in range(size.nodes)
    ]


def peft_loop(size: Size, device: str, precision: Precision) -> Callable[[], None]:
    """A round of FedAvg as one writes it with PEFT: every client in turn takes the adapter and trains it."""
    half = precision == "bfloat16"
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
                with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=half):
                    loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
            torch._foreach_add_(total, [parameter.detach() for parameter in trained])
        for mean, sum_ in zip(server, total, strict=True):
            mean.copy_(sum_ / size.nodes)

    return round


def trainer_losses(size: Size, device: str, rule: str, batches: list[Tensor]) -> list[float]:
    """The losses that the ``Trainer`` reports for these batches, one after the other."""
    rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch.cpu()]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size.batch,
            max_steps=len(batches),
            optim=rule,
            learning_rate=size.lr(rule),
            weight_decay=getattr(RULES[rule], "weight_decay", 0.0),
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


def simulation(
    size: Size,
    device: str,
    method: hf.Method,
    executor: Executor | None = None,
    precision: Precision = "tf32",
) -> Simulation:
    """The same model and data as nodes of holdfast."""
    problem = build_problem(
        peft_model(size, device),
        hf.FederatedData.of_nodes([{"input_ids": text, "labels": text} for text in texts(size)]),
        step=lambda model, batch: model(**batch).loss,
        batch_size=size.batch,
        device=device,
        precision=precision,
    )
    return Simulation(method, problem, as_network("server", size.nodes), executor=executor)


def compared_with_trainer(size: Size, device: str, rule: str, steps: int) -> list[tuple[float, float]]:
    """(our loss, the ``Trainer``'s) of one client alone in every step, on the same batches, no dropout."""
    size, method = replace(size, nodes=1, dropout=0.0), hf.FedAvg(lr=size.lr(rule), optimizer=RULES[rule])
    alone = simulation(size, device, method, executor_for(torch.device(device)))
    problem, node = alone.problem, torch.zeros(1, dtype=torch.int64, device=device)
    alone.prepare(steps)
    batches, losses = [], []
    for step in range(steps):
        batch = problem.source.batch(node, step, 0)
        batches.append(batch.samples["input_ids"][0])
        with torch.no_grad():
            losses.append(float(problem.backend.values(alone.models, batch, no_key(alone.models)[None])))
        alone.step()
    return list(zip(losses, trainer_losses(size, device, rule, batches), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--dropout", type=float, default=0.0, help="lora_dropout of the timed models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer-steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="where the time of a compiled round goes")
    parser.add_argument("--only", nargs="*", help="names of the ways to time, such as 'FedAvg, bfloat16'")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    size, device = replace(TINY if given.tiny else Size(), dropout=given.dropout), given.device
    torch.set_float32_matmul_precision("high")  # TF32 for the loop, too
    rates: dict[str, float] = {}
    for name, precision in (("PEFT loop", "tf32"), ("PEFT loop, autocast", "bfloat16")):
        rates[name] = size.tokens / seconds(peft_loop(size, device, precision), device, 2)
        print(f"{name:36s}{rates[name]:10,.0f} tokens/s", flush=True)
    loop = max(rates.values())
    ways = [
        ("FedAvg, step by step", hf.FedAvg, "tf32", None),
        ("FedAvg, short run", hf.FedAvg, "tf32", SHORT_RUN),
        ("FedAvg, short run, bfloat16", hf.FedAvg, "bfloat16", SHORT_RUN),
        ("FedAvg, bfloat16", hf.FedAvg, "bfloat16", LONG_RUN),
        ("Local G-ECL, bfloat16", hf.LocalGECL, "bfloat16", LONG_RUN),
        ("FedAvg", hf.FedAvg, "tf32", LONG_RUN),
    ]
    pairs = {rule: compared_with_trainer(size, device, rule, given.trainer_steps) for rule in RULES}
    worst = {rule: max(abs(ours - theirs) for ours, theirs in of_rule) for rule, of_rule in pairs.items()}
    for rule, of_rule in pairs.items():
        losses = f"losses from {of_rule[0][1]:.4f} to {of_rule[-1][1]:.4f}"
        print(f"Trainer, {rule}: {losses}, ours differ by at most {worst[rule]:.1e}", flush=True)
    for name, method, precision, rounds in ways:
        if given.only and name not in given.only:
            continue
        _empty(device)
        executor = None if rounds is None else executor_for(torch.device(device))
        run = simulation(size, device, method(lr=LR, local_steps=size.steps), executor, precision)
        start = time.perf_counter()
        how = run.prepare(rounds or 1)
        ready = f"ready after {time.perf_counter() - start:.0f} s{_peak(device)}"
        rates[name] = size.tokens / seconds(run.step, device, given.rounds)
        ratio = f"{rates[name] / loop:6.2f} times the loop"
        print(f"{name:36s}{rates[name]:10,.0f} tokens/s {ratio}  ({how}; {ready})", flush=True)
        if given.profile and name == "FedAvg, bfloat16":
            _profile(run)
        del run, executor
    if given.output:
        table = {"tokens_per_second": rates, "largest_difference": worst, "losses": pairs}
        given.output.write_text(json.dumps(table, indent=1))


def _empty(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> str:
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.startswith("cuda") else ""


def _profile(run: Simulation) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run.step()
    print("breaks in what was compiled:", dict(torch._dynamo.utils.counters["graph_break"]) or "none")
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=20, max_name_column_width=60))


if __name__ == "__main__":
    main()
