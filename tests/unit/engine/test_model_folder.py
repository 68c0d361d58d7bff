"""Folders as Hugging Face lays them out, written by its own libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvtier.engine.config import SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.model_folder import FolderStreamDecoder, open_model
from kvtier.engine.files.tokenizer import ChatMessage
from kvtier.errors import BadRequest
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone
from tests.support.transformers_twin import to_transformers

pytestmark = pytest.mark.slow
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    to_transformers(tiny_model()).save_pretrained(tmp_path)
    letters = ["Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())[:95]]  # The first is a space.
    vocab = {letter: index for index, letter in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_folder_is_the_model_that_was_saved(folder: Path) -> None:
    model, text_model = open_model(folder)
    assert model.config == tiny_model().config
    assert torch.equal(model.weights.layers[1].qkv, tiny_model().weights.layers[1].qkv)
    params, prompt = SamplingParams(tokens_max=6), prompt_of(9)
    assert Engine(model).generate([prompt], params)[0].token_ids == tokens_alone(prompt, params)
    assert model.weights_digest.startswith("sha256:")
    decoder = text_model.stream_decoder()
    ids = text_model.encode("a b!")
    assert "".join(map(decoder.feed, ids)) + decoder.finish() == "a b!"
    assert text_model.end_id == 96


def test_character_in_several_tokens_comes_whole_and_streams_stay_short() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    judge = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    judge.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    judge.decoder = decoders.ByteLevel()
    counted: list[int] = []

    class Counting:
        def decode(self, ids: list[int]) -> str:
            counted.append(len(ids))
            text: str = judge.decode(ids)
            return text

    text = "né 🙂日 " * 20
    decoder = FolderStreamDecoder(Counting())
    pieces = [decoder.feed(one) for one in judge.encode(text).ids]
    assert "".join(pieces) == text
    assert set(pieces) == {"", *text}
    assert max(counted) <= 8
    assert decoder.feed(judge.encode("🙂").ids[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_template_that_refuses_a_chat_is_the_clients_mistake(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    refusal = "{{ raise_exception('roles must alternate') }}"
    path.write_text(json.dumps(config | {"chat_template": refusal}))
    _, text_model = open_model(folder)
    with pytest.raises(BadRequest, match="refuses this chat: roles must alternate"):
        text_model.chat([ChatMessage("user", "hi")])


def test_chat_is_rendered_by_the_models_template(folder: Path) -> None:
    _, text_model = open_model(folder)
    assert text_model.chat([ChatMessage("user", "hi")]) == text_model.encode("user hi\n")


def test_folder_that_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="there is no such file or folder"):
        open_model(tmp_path / "none")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(BadRequest, match="only llama is known"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadRequest, match=r"no \*.safetensors"):
        open_model(folder)
