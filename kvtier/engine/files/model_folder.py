"""Llama-architecture models of files: a GGUF, or a folder as Hugging Face lays them out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtier.engine.config import ModelConfig
from kvtier.engine.files.gguf_file import BadModelFile, GgufFile
from kvtier.engine.files.smollm2 import load_model, load_smollm2, load_tokenizer
from kvtier.engine.files.tokenizer import ChatMessage
from kvtier.engine.model import LayerWeights, LlamaModel, ModelWeights
from kvtier.errors import BadRequest

if TYPE_CHECKING:
    from kvtier.engine.http.openai_api import TextModel


def open_model(path: Path | None) -> tuple[LlamaModel, TextModel]:
    """SmolLM2 where no path is given. Raises BadRequest that says what is wrong with the path."""
    try:
        if path is None:
            return load_smollm2()
        if path.is_dir():
            folder = ModelFolder(path)
            return folder.load(), FolderTokenizer(path)
        if not path.is_file():
            raise BadModelFile("there is no such file or folder")
        file = GgufFile(path)
        return load_model(file, path.stem), load_tokenizer(file)
    except (BadModelFile, KeyError, OSError, ValueError) as error:
        raise BadRequest(f"--model {path}: {error}") from None


class ModelFolder:
    """`config.json` and the tensors of every `*.safetensors` beside it."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if values.get("model_type") != "llama":
            raise BadModelFile(f"model_type {values.get('model_type')!r}: only llama is known")
        self.config = _config_of(values)
        self._is_tied = bool(values.get("tie_word_embeddings", False))
        self._tensors: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping.
                    self._tensors[name] = opened.get_tensor(name)
        if not self._tensors:
            raise BadModelFile("the folder has no *.safetensors")

    def load(self, *, dtype: torch.dtype = torch.float32) -> LlamaModel:
        """The model, named after its folder; its digest is of all weight files."""
        embedding = self._tensor("model.embed_tokens", dtype)
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(i, dtype) for i in range(self.config.layer_count)),
            final_norm=self._tensor("model.norm", dtype),
            output=embedding if self._is_tied else self._tensor("lm_head", dtype),
        )
        return LlamaModel(self._path.resolve().name, self.config, weights, self._digest())

    def _layer(self, index: int, dtype: torch.dtype) -> LayerWeights:
        def tensor(name: str) -> Tensor:
            return self._tensor(f"model.layers.{index}.{name}", dtype)

        return LayerWeights(
            attention_norm=tensor("input_layernorm"),
            qkv=torch.cat([tensor(f"self_attn.{part}_proj") for part in "qkv"]),
            attention_out=tensor("self_attn.o_proj"),
            ffn_norm=tensor("post_attention_layernorm"),
            gate_up=torch.cat([tensor("mlp.gate_proj"), tensor("mlp.up_proj")]),
            down=tensor("mlp.down_proj"),
        )

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if (tensor := self._tensors.get(f"{name}.weight")) is None:
            raise BadModelFile(f"there is no tensor {name}.weight")
        return tensor.to(dtype)

    def _digest(self) -> str:
        hasher = hashlib.sha256()
        for file in sorted(self._path.glob("*.safetensors")):
            with file.open("rb") as opened:
                hasher.update(hashlib.file_digest(opened, "sha256").digest())
        return f"sha256:{hasher.hexdigest()}"


def _config_of(values: dict[str, Any]) -> ModelConfig:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise BadModelFile(
            f"rotary embedding {rope.get('rope_type')!r} is unknown, only default is"
        )
    if values.get("attention_bias") or values.get("mlp_bias"):
        raise BadModelFile("biases are unknown")
    head_count = values["num_attention_heads"]
    return ModelConfig(
        layer_count=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_size=values["intermediate_size"],
        head_count=head_count,
        kv_head_count=values.get("num_key_value_heads") or head_count,
        head_size=values.get("head_dim") or values["hidden_size"] // head_count,
        vocab_size=values["vocab_size"],
        rope_base=rope.get("rope_theta") or values.get("rope_theta") or 10_000.0,
        norm_epsilon=values.get("rms_norm_eps", 1e-5),
        context_tokens_max=values.get("max_position_embeddings", 2048),
    )


class FolderTokenizer:
    """`tokenizer.json` by the tokenizers package, and the chat template of
    `tokenizer_config.json` by Jinja in its sandbox."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        config_path = path / "tokenizer_config.json"
        has_config = config_path.is_file()
        self._config = json.loads(config_path.read_text("utf-8")) if has_config else {}
        end = self._config.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        end_id = None if end is None else self._tokenizer.token_to_id(end)
        if end_id is None:
            raise BadModelFile("tokenizer_config.json names no eos_token of the vocabulary")
        self.end_id: int = end_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise BadRequest("this model has no chat template: use /v1/completions")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse  # Of Hugging Face's templates.
        turns = [{"role": one.role, "content": one.content} for one in messages]
        try:
            text = environment.from_string(template).render(
                messages=turns,
                add_generation_prompt=True,
                eos_token=self._tokenizer.id_to_token(self.end_id),
                bos_token=self._config.get("bos_token") or "",
            )
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses this chat: {error}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def stream_decoder(self) -> FolderStreamDecoder:
        return FolderStreamDecoder(self._tokenizer)


class FolderStreamDecoder:
    """A character in several tokens comes with its last. What was given out last is decoded anew
    with what follows: at the beginning of a text a tokenizer may leave out a space."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given_count = 0  # Of `_ids`.

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        piece = self._fresh()
        if piece.endswith("\ufffd"):
            return ""
        del self._ids[: self._given_count]
        self._given_count = len(self._ids)
        return piece

    def finish(self) -> str:
        return self._fresh()

    def _fresh(self) -> str:
        text: str = self._tokenizer.decode(self._ids)
        return text[len(self._tokenizer.decode(self._ids[: self._given_count])) :]
