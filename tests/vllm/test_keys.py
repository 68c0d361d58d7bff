"""What vLLM's own hashes tell apart, and what we add: adapters, media, salts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvtier.connector.heads import Head
from kvtier.connector.vllm.adapters import AdapterHashes
from tests.support.daemon import RunningDaemon
from tests.vllm.adapters import RANK, adapter_of, write_adapter
from tests.vllm.engines import generated, greedy, transfer_config, vllm_engine
from tests.vllm.identity import differing
from tests.vllm.scheduler_rig import SchedulerRig, prompt_of
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def write_adapters(folder: Path) -> None:
    for seed, name in enumerate(("red", "blue")):
        write_adapter(folder / name, seed=seed)


def media(identifier: str, *, offset: int = 20) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=offset, length=16)
    return [MultiModalFeatureSpec(None, "image", identifier, place)]


def facts_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Requests with one prompt that are no two alike."""
    if kind == "adapter":
        write_adapters(folder)
        return [{"lora_request": adapter_of(folder, n, i)} for i, n in ((1, "red"), (2, "blue"))]
    if kind == "media":
        return [{"mm_features": media("a")}, {"mm_features": media("b")}]
    return [{"cache_salt": "one"}, {"cache_salt": "two"}]


def let_media_through(rig: SchedulerRig) -> None:
    """The tiny Llama has no encoder, so that vLLM gives it no budget for one."""
    rig.scheduler.max_num_encoder_input_tokens = 1024
    rig.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1024)


def rig_of(model: Path) -> SchedulerRig:
    rig = SchedulerRig(model)
    let_media_through(rig)
    return rig


def onboarded_by(rig: SchedulerRig, name: str, facts: dict[str, Any] | None) -> int:
    """Blocks that the engine, started again, gets for the prompt with these facts."""
    rig.restart()
    let_media_through(rig)
    rig.add(name, prompt_of(100), tokens=1, facts=facts)
    rig.run()
    rig.check_nothing_left()
    return rig.core.stats().onboarded_blocks


@pytest.mark.parametrize(("kind", "common"), [("adapter", 0), ("media", 1), ("salt", 0)])
def test_equal_prompts_match_as_far_as_all_else_is_equal(
    tiny_llama: Path, tmp_path: Path, kind: str, common: int
) -> None:
    """Media come with the second block, and what is before them is common to all."""
    rig = rig_of(tiny_llama)
    one, other = facts_of(kind, tmp_path)
    rig.add("first", prompt_of(100), tokens=1, facts=one)
    rig.run()
    assert onboarded_by(rig, "base", None) == common
    assert onboarded_by(rig, "other", other) == common
    for name, facts in (("one again", one), ("other again", other), ("base again", None)):
        assert onboarded_by(rig, name, facts) == 6


def test_same_medium_at_another_place_is_another_block(tiny_llama: Path) -> None:
    rig = rig_of(tiny_llama)
    rig.add("first", prompt_of(100), tokens=1, facts={"mm_features": media("a")})
    rig.run()
    assert onboarded_by(rig, "moved", {"mm_features": media("a", offset=24)}) == 1


def test_adapter_trained_anew_under_its_name_and_path_does_not_match(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """vLLM hashes name and path alone."""
    rig = rig_of(tiny_llama)
    write_adapter(tmp_path / "red", seed=0)
    facts = {"lora_request": adapter_of(tmp_path, "red", 1)}
    rig.add("old", prompt_of(100), tokens=1, facts=facts)
    rig.run()
    write_adapter(tmp_path / "red", seed=1)
    assert onboarded_by(rig, "new", facts) == 0
    assert onboarded_by(rig, "new again", facts) == 6


def test_adapter_whose_files_change_while_it_is_loaded_goes_without_kvtier(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rig = rig_of(tiny_llama)
    write_adapter(tmp_path / "red", seed=0)
    loaded = {"lora_request": adapter_of(tmp_path, "red", 1)}
    rig.add("old", prompt_of(100), tokens=1, facts=loaded)
    rig.run()
    write_adapter(tmp_path / "red", seed=1)
    before = len(rig.client.commits)
    rig.add("which", prompt_of(100, seed=1), tokens=1, facts=loaded)
    rig.run()
    assert len(rig.client.commits) == before
    # Nor under another number: what the engine has cached is found by name and path.
    rig.add("same", prompt_of(100, seed=1), tokens=1, facts=numbered(loaded, 2))
    rig.run()
    assert len(rig.client.commits) == before
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.add("new", prompt_of(100, seed=1), tokens=1, facts=numbered(loaded, 3))
    rig.run()
    assert len(rig.client.commits) == before + 6


class SlowHashes(list[bytes]):
    """vLLM's own list; `meanwhile` happens while somebody reads what is new in it."""

    meanwhile: Any = None

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        happening, self.meanwhile = self.meanwhile, None
        if happening is not None:
            happening()
        return found


def test_thread_that_reads_an_adapters_hashes_moves_none_of_them() -> None:
    """vLLM's list grows while the planning's other thread asks the daemon about its beginning."""
    known = SlowHashes(bytes([n]) * 32 for n in range(4))
    hashes = AdapterHashes(known, b"\x80" * 32)
    asked = Head(hashes, len(hashes))
    known += [bytes([n]) * 32 for n in range(4, 8)]
    known.meanwhile = lambda: list(asked)
    wanted = [bytes([n ^ 0x80]) * 32 for n in range(8)]
    assert len(hashes) == 8
    assert list(hashes) == wanted
    assert list(asked) == wanted[:4]


def numbered(facts: dict[str, Any], number: int) -> dict[str, Any]:
    known = facts["lora_request"]
    return {"lora_request": LoRARequest(known.lora_name, number, known.lora_path)}


def test_adapter_whose_files_are_not_found_goes_without_kvtier(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rig = rig_of(tiny_llama)
    facts = {"lora_request": LoRARequest("hub", 1, "somebody/adapter")}
    rig.add("first", prompt_of(100), tokens=1, facts=facts)
    rig.run()
    assert rig.client.commits == []
    rig.check_nothing_left()


@needs_engine
def test_real_engine_says_the_same_with_each_adapter_and_hits_its_own_blocks_alone(
    tiny_llama: Path, daemon: RunningDaemon, tmp_path: Path
) -> None:
    write_adapters(tmp_path)
    adapters = [None, adapter_of(tmp_path, "red", 1), adapter_of(tmp_path, "blue", 2)]
    transfer = transfer_config(daemon.socket, onboard_wait_seconds=2.0)
    rounds: list[list[Any]] = []
    onboarded = []
    for socket in (None, transfer, transfer):
        options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
        with vllm_engine(tiny_llama, socket, **options) as engine:
            if socket is not None:
                engine.wait_ready()
            said = []
            for adapter in adapters:
                prompt = {"prompt_token_ids": prompt_of(100)}
                said += engine.llm.generate(
                    [prompt], greedy(8), use_tqdm=False, lora_request=adapter
                )
            rounds.append([generated(output) for output in said])
            if socket is not None:
                engine.settle()
                onboarded.append(engine.stats.onboarded_blocks)
    alone, first, second = rounds
    assert differing(alone, first) == differing(alone, second) == []
    assert len({g.token_ids for g in alone}) == 3, "the adapters say different things"
    assert onboarded == [0, 9]
    assert [g.cached_count for g in second] == [96, 96, 96]
