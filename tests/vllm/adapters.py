"""LoRA adapters for the tiny Llama, written here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

RANK = 8
# Of the tiny Llama's attention: name, and size of what comes out.
PARTS = (("q_proj", 128), ("k_proj", 64), ("v_proj", 64))


def write_adapter(folder: Path, *, seed: int) -> None:
    """Equal seeds give equal weights; they change much of what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, size in PARTS:
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, 128)), ("lora_B", (size, RANK))):
                values = torch.randn(*shape, generator=random) * 0.3
                tensors[f"{place}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    facts = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [name for name, _ in PARTS],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def adapter_of(folder: Path, name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, str(folder / name))
