"""PEFT models of the transformers library: all nodes in one call, and adapters that PEFT loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import holdfast as hf
from holdfast.experiments.setting import build_problem
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.adapters import Together

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

NODES, BATCH, LENGTH, WORDS = 3, 2, 12, 30


def language_model(attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.Qwen2ForCausalLM(config).double()


def with_lora(model: nn.Module, dropout: float = 0.0) -> Any:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout)
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def batch_of_nodes() -> dict[str, Tensor]:
    """Sequences that are padded differently, so that nodes have different numbers of tokens to predict."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (NODES, BATCH, LENGTH), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 0, 5:] = 0
    mask[2, :, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_are_those_of_a_loop_over_clients(attention) -> None:
    model, batch = with_lora(language_model(attention)), batch_of_nodes()
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    draw = torch.Generator().manual_seed(2)
    rows = {
        name: p + 0.1 * torch.randn(NODES, *p.shape, dtype=p.dtype, generator=draw)
        for name, p in trained.items()
    }

    def task(run: Any, own: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return run(own, (), batch).loss

    together = Together(model, list(rows))
    found = grad(lambda rows: together.values(task, rows, batch).sum())(rows)

    def alone(own: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        return functional_call(model, own, args, kwargs)

    for node in range(NODES):
        own, part = ({name: rows[node] for name, rows in tree.items()} for tree in (rows, batch))
        expected = grad(lambda own, part=part: task(alone, own, part))(own)
        for name in rows:
            torch.testing.assert_close(found[name][node], expected[name], rtol=1e-10, atol=1e-12)


def train(backend: str, rounds: int = 2, dropout: float = 0.0) -> hf.TrainResult:
    parts = batch_of_nodes()
    return hf.train(
        hf.LocalGECL(lr=0.3, local_steps=3),
        model=with_lora(language_model(), dropout),
        data=[{name: part[node] for name, part in parts.items()} for node in range(NODES)],
        step=lambda model, batch: model(**batch).loss,
        rounds=rounds,
        batch_size=2,
        dtype="float64",
        backend=backend,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_backends_train_alike(dropout) -> None:
    start = FlatModel(with_lora(language_model()), torch.device("cpu"), torch.float64).x0
    adapters, loop = (train(backend, dropout=dropout) for backend in ("adapters", "loop"))
    assert not torch.allclose(loop.models[0], start, atol=1e-3)
    torch.testing.assert_close(adapters.models, loop.models, rtol=1e-10, atol=1e-12)


def test_the_result_is_saved_as_an_adapter_that_peft_loads(tmp_path) -> None:
    trained = train("auto").model
    trained.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(language_model(), str(tmp_path), autocast_adapter_dtype=False)
    ids = batch_of_nodes()["input_ids"][0]
    with torch.no_grad():
        outputs = [model.eval()(input_ids=ids).logits for model in (trained, loaded, language_model())]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(outputs[0], outputs[2])


def test_a_frozen_body_keeps_its_type_and_is_chosen_for() -> None:
    model = with_lora(language_model())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    flat = FlatModel(model, torch.device("cpu"), torch.float32)
    [[training, places], _] = flat.parts
    types = {p.dtype for name, p in training.named_parameters() if name not in places}
    assert types == {torch.bfloat16}
    parts = batch_of_nodes()
    problem = build_problem(
        model,
        hf.FederatedData.of_nodes(
            [{name: part[node] for name, part in parts.items()} for node in range(NODES)]
        ),
        step=lambda model, batch: model(**batch).loss,
        batch_size=2,
    )
    assert problem.backend.description == "all nodes end to end over one frozen model"


def test_lora_dropout_changes_the_result() -> None:
    assert not torch.allclose(train("auto").models, train("auto", dropout=0.1).models, atol=1e-3)
