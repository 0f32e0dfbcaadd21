"""Sentences of a small invented world in eight dialects, and a character model that has read one of them."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

WORDS = """
who: sailor baker miller widow shepherd doctor teacher fisher captain painter hunter farmer
what: lamp boat letter basket mirror barrel hammer candle violin saddle ribbon kettle
where: harbour village market mountain garden river chapel station forest island
like: old quiet young silver broken heavy little golden distant hungry
does: carries follows remembers paints hides mends borrows forgets sells finds
"""
WHO, WHAT, WHERE, LIKE, DOES = (line.split()[1:] for line in WORDS.strip().splitlines())

ALPHABET = "abcdefghijklmnopqrstuvwxyz ."
NODES = 8
CONTEXT = 32  # characters of a sample

# What makes a dialect: the order of subject, verb and object; letters that swap in pairs; an ending of nouns.
ORDERS = ("svo", "sov", "vso", "ovs")
SHIFTS = ("", "eaio", "tdsz", "aoui", "rlnm", "pbkg", "iyou", "hwvf")
ENDINGS = ("", "a", "en", "is", "o", "um", "et", "ur")


def sentence(dialect: int, draw: random.Random) -> str:
    """One sentence; dialect 0 is the standard language."""
    parts = {
        "s": ["the", *_perhaps(LIKE, draw), draw.choice(WHO)],
        "v": [draw.choice(DOES)],
        "o": ["a", *_perhaps(LIKE, draw), draw.choice(WHAT)],
    }
    words = [word for role in ORDERS[dialect % len(ORDERS)] for word in parts[role]]
    words += ["in", "the", draw.choice(WHERE)]
    shift = SHIFTS[dialect]
    heard = str.maketrans(shift[::2] + shift[1::2], shift[1::2] + shift[::2])
    endings = [word + ENDINGS[dialect] if word in WHO + WHAT + WHERE else word for word in words]
    return " ".join(endings).translate(heard) + ". "


def samples(dialect: int, count: int, seed: int) -> Tensor:
    """``count`` pieces of running text as numbers of characters, [count, CONTEXT] int64."""
    draw, text = random.Random(f"{dialect} {seed}"), ""
    while len(text) < count * CONTEXT:
        text += sentence(dialect, draw)
    numbers = torch.tensor([ALPHABET.index(letter) for letter in text[: count * CONTEXT]])
    return numbers.view(count, CONTEXT)


def character_model(seed: int = 0, steps: int = 600) -> Qwen2ForCausalLM:
    """A transformer of 0.1 million parameters, trained from scratch on the standard language."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(ALPHABET),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    text = samples(0, 2000, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = text[torch.randint(len(text), (32,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval()


def _perhaps(words: list[str], draw: random.Random) -> list[str]:
    return [draw.choice(words)] if draw.random() < 0.4 else []
