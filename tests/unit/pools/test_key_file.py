from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.pools.key_file import KEY_ID_MAX, Key, format_keys, new_key, parse_keys, read_key_file

SECRET = "ab" * 32


def test_the_first_key_is_first_and_comments_are_skipped() -> None:
    keys = parse_keys(f"# ours\n\n7 {SECRET}\n 3   {'cd' * 32} \n", "file")
    assert keys == [Key(7, b"\xab" * 32), Key(3, b"\xcd" * 32)]
    assert parse_keys(format_keys(keys), "file") == keys
    assert new_key(keys).id == 8, "a number is never given again"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no key in it: make one with `kvtier key keys`"),
        (f"0 {SECRET}", "line 1: the number of a key"),
        (f"{KEY_ID_MAX + 1} {SECRET}", "the number of a key"),
        (f"one {SECRET}", "the number of a key"),
        (f"1 {SECRET}00", "64 hexadecimal digits"),
        ("1 secret", "64 hexadecimal digits"),
        (f"1 {SECRET}\n2", "line 2: a key is its number and 64"),
        (f"1 {SECRET}\n1 {'cd' * 32}", "two keys have the same number"),
    ],
)
def test_what_is_no_key_is_told_without_quoting_it(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "keys")
    assert told in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "secret is" in str(caught.value) or "secret" not in str(caught.value)


@given(st.text("0123456789abcdef #\n", max_size=150))
def test_any_text_is_keys_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_keys(text, "file")


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"1 {SECRET}\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(path)
    path.chmod(0o640)  # As systemd leaves a credential.
    assert read_key_file(path)[0].id == 1
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "none")


def test_the_command_puts_a_new_key_on_top(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    assert main(["key", str(path)]) == 0
    assert main(["key", str(path)]) == 0
    keys = read_key_file(path)
    assert [key.id for key in keys] == [2, 1]
    assert path.stat().st_mode & 0o777 == 0o600
    printed = capsys.readouterr().out
    assert "key 2 seals" in printed
    assert not any(key.secret.hex() in printed for key in keys)


def test_a_change_that_was_broken_off_loses_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    assert main(["key", str(path)]) == 0
    (tmp_path / "keys.new").touch()
    assert main(["key", str(path)]) == 2
    assert "remove it" in capsys.readouterr().err
    assert [key.id for key in read_key_file(path)] == [1]
