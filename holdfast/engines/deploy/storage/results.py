"""The model that a member leaves behind for its people."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from holdfast.engines.deploy.storage.messages import settle
from holdfast.problem.flat import FlatModel


def write_model(
    folder: Path, model: FlatModel, row: Tensor, notes: dict[str, Any], name: str = "model"
) -> None:
    """The module with parameters ``row`` [d] as ``model.safetensors``, or under another ``name``."""
    tensors, memory = {}, set()
    for key, tensor in model.module(row).state_dict().items():
        shared = tensor.data_ptr() in memory  # tied weights, which safetensors would refuse
        memory.add(tensor.data_ptr())
        tensors[key] = tensor.clone() if shared else tensor.contiguous()
    temporary = folder / f".{name}.safetensors.partial"
    try:
        safetensors.torch.save_file(tensors, temporary, {"holdfast": json.dumps(notes)})
    except safetensors.SafetensorError as error:  # it hides a full disk in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(temporary)) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    settle(temporary, folder / f"{name}.safetensors")


def read_model(folder: Path, model: FlatModel) -> Tensor:
    """The parameters, [d], that ``write_model`` wrote."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in model.shapes])
