from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.model_files import find_config, read_config
from kvtier.cli.size import seconds_text
from kvtier.errors import BadRequest
from tests.unit.sizing.published import GEMMA_3_27B, OPT_13B

COMMIT = "0123456789abcdef"


@pytest.fixture
def opt(tmp_path: Path) -> Path:
    folder = tmp_path / "opt-13b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OPT_13B))
    return folder


def size_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main.main(["size", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_opt_13b_takes_819200_bytes_a_token(opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = size_of(capsys, "--model", str(opt), "--tier-gib", "64", "--tier-gib", "0.5")
    assert found["token_bytes"] == 819_200
    assert found["block_bytes"] == 13_107_200
    assert found["groups"] == [
        {
            "attention": "full",
            "layers": 40,
            "kv_heads": 40,
            "head_dim": 128,
            "window_tokens": None,
            "token_bytes": 819_200,
        }
    ]
    # A prompt of 8,192 tokens is 512 blocks, 6,710,886,400 B; 64 GiB hold 10.24 of them.
    large, small = found["tiers"]
    assert (large["blocks"], large["tokens"]) == (5_242, 83_872)
    assert [one["count"] for one in large["prompts"]] == [81, 10, 0]
    assert (small["tier_bytes"], small["blocks"]) == (1 << 29, 40)
    link = next(one for one in found["links"] if one["link"] == "GPU, PCIe 5.0 x16")
    # 13,107,200 B at 50 GB/s.
    assert link["block_seconds"] == pytest.approx(262.1e-6, rel=1e-3)


def test_a_prompt_shorter_than_a_block_has_no_count(
    opt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", str(opt), "--block-tokens", "1100", "--tier-gib", "1")
    found = size_of(capsys, *words)
    assert [one["count"] for one in found["tiers"][0]["prompts"]] == [None, 0, 0]


def test_the_text_tells_what_the_json_tells(opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["size", "--model", str(opt), "--tp", "8", "--tier-gib", "64"]) == 0
    text = capsys.readouterr().out
    # A rank's eighth of a block: 102,400 B a token, 32.8 µs at 50 GB/s.
    for told in ("819,200", "102,400", "13,107,200", "5,242", "83,872", "each rank", "32.8 µs"):
        assert told in text
    assert "windows only" not in text


def test_windows_have_a_line_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps(GEMMA_3_27B))
    assert main.main(["size", "--model", str(path), "--tier-gib", "64"]) == 0
    text = capsys.readouterr().out
    # 8 K: 512 × 8,126,464 B, or 512 × 1,310,720 + 64 × 6,815,744 B.
    assert "16" in next(line for line in text.splitlines() if "64.0 GiB" in line).split()
    assert "62" in next(line for line in text.splitlines() if "windows only" in line).split()


def test_bad_input_is_one_line_that_says_what_to_do(
    tmp_path: Path, opt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights").write_bytes(b"\x80\x81\xff" * 100)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty").mkdir()
    for words, told in (
        (["--model", str(tmp_path / "weights")], "is no JSON: give the model's config.json"),
        (["--model", str(tmp_path / "list.json")], "holds no JSON object"),
        (["--model", str(tmp_path / "deep.json")], "is no JSON"),
        (["--model", str(tmp_path / "empty")], "has no config.json: give a model's folder"),
        (["--model", str(tmp_path / "nothing here")], "give the path of a config.json"),
        (["--model", "/dev/zero"], "too large"),
        (["--model", "x" * 5000], "cannot be looked at"),
        (["--model", str(opt), "--tp", "3"], "cannot be split among 3 ranks"),
    ):
        assert main.main(["size", *words, "--json"]) == main.EXIT_USAGE
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1
        assert told in output.err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", "x", "--tp", "0"],
        ["--model", "x", "--kv-dtype", "int4"],
        ["--model", "x", "--tier-gib", "nan"],
        ["--model", "x", "--tier-gib", "-1"],
        ["--model", "x", "--tier-gib", "1/0"],
        ["--model", "x", "--tier-gib", "1e9"],
        ["--model", "x", "--block-tokens", "many"],
    ],
)
def test_arguments_that_do_not_fit_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["size", *words])
    assert ended.value.code == main.EXIT_USAGE


def hub_with(root: Path, *revisions: str, main_is: str | None = None) -> Path:
    """A cache as huggingface_hub leaves it."""
    folder = root / "models--facebook--opt-13b"
    for revision in revisions:
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(OPT_13B))
    if main_is is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main_is)
    return folder / "snapshots"


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_model_that_lies_in_the_cache_is_found_by_its_name(
    variable: str, below: str, tmp_path: Path
) -> None:
    snapshots = hub_with(tmp_path / below, COMMIT, "older", main_is=COMMIT + "\n")
    found = find_config("facebook/opt-13b", {variable: str(tmp_path)})
    assert found == snapshots / COMMIT / "config.json"
    assert read_config(found) == OPT_13B


def test_the_only_revision_is_taken_and_of_several_none(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    with pytest.raises(BadRequest, match="nothing is downloaded: give the path"):
        find_config("facebook/opt-13b", environ)
    snapshots = hub_with(tmp_path, COMMIT)
    assert find_config("facebook/opt-13b", environ) == snapshots / COMMIT / "config.json"
    hub_with(tmp_path, "another")
    with pytest.raises(BadRequest, match="2 revisions"):
        find_config("facebook/opt-13b", environ)


@pytest.mark.parametrize(
    "name", ["../models--facebook--opt-13b", "a/b/c", "/x/y", "a b", "..", "-x"]
)
def test_only_names_of_models_are_looked_for_in_the_cache(name: str, tmp_path: Path) -> None:
    hub_with(tmp_path, COMMIT)
    with pytest.raises(BadRequest):
        find_config(name, {"HF_HUB_CACHE": str(tmp_path)})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000015, "1.5 µs"),
        (0.000262, "262 µs"),
        (0.0131, "13.1 ms"),
        (1.2, "1.2 s"),
        (4321.0, "4321 s"),
    ],
)
def test_times_have_three_digits_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


PROGRAM = """
import sys
from kvtier.cli.main import main
code = main(["size", "--model", sys.argv[1]])
heavy = {"torch", "transformers", "huggingface_hub", "grpc", "vllm"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else code)
"""


@pytest.mark.slow
def test_no_library_of_models_is_imported(opt: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(opt)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "819,200" in done.stdout
