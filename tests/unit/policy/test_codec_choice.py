"""The choice of codecs, in virtual time, from figures that were measured (2 MiB of bf16, one core).

The model of a batch is the pipeline of `RemoteBlocks`: groups are encoded while the last one is
sent, and decoded while the next one is received.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvtier.policy.codec_choice import NONE, CodecChoice

LZ4, ZSTD = 1, 2
GROUPS = 8
BATCH_BYTES = 32e6
BLOCK_BYTES = 2e6


@dataclass(frozen=True)
class Figures:
    """GB/s of payload, and payload for one byte sent."""

    encoding: float
    decoding: float
    ratio: float


# reference figures of host_path: planes split and woven included.
BF16 = {
    NONE: Figures(9.0, 9.0, 1.0),
    LZ4: Figures(0.70, 1.9, 1.136),
    ZSTD: Figures(0.62, 1.4, 1.427),
}
FP8 = {NONE: Figures(9.0, 9.0, 1.0), LZ4: Figures(9.0, 9.0, 1.0), ZSTD: Figures(0.94, 1.28, 1.147)}


class Link:
    """One that sends and receives at a speed, and a machine that is busy by up to a fifth."""

    def __init__(self, figures: dict[int, Figures], gigabytes: float, seed: int = 0) -> None:
        self.figures = figures
        self.gigabytes = gigabytes
        self._chance = random.Random(seed)

    def noisy(self, seconds: float) -> float:
        return seconds * self._chance.uniform(1.0, 1.2)

    def batch(self, codec: int, choice: CodecChoice | None = None) -> float:
        """Seconds of one batch out and back; the choice is told what is measured on the way."""
        figures = self.figures[codec]
        part = BATCH_BYTES / GROUPS
        total = 0.0
        for down in (True, False):
            speed = figures.encoding if down else figures.decoding
            work = self.noisy(part / (1e9 * speed))
            move = self.noisy(part / figures.ratio / (1e9 * self.gigabytes))
            total += max(work, move) * GROUPS + min(work, move)
            if choice is not None:
                self._tell(choice, codec, down=down, work=work, move=move)
        return total

    def trial(self, codec: int, choice: CodecChoice) -> float:
        figures = self.figures[codec]
        encoding = self.noisy(BLOCK_BYTES / (1e9 * figures.encoding))
        decoding = self.noisy(BLOCK_BYTES / (1e9 * figures.decoding))
        choice.note_encoded(
            codec,
            payload_bytes=int(BLOCK_BYTES),
            encoded_bytes=int(BLOCK_BYTES / figures.ratio),
            seconds=encoding,
        )
        choice.note_decoded(codec, payload_bytes=int(BLOCK_BYTES), seconds=decoding)
        return encoding + decoding

    def _tell(
        self, choice: CodecChoice, codec: int, *, down: bool, work: float, move: float
    ) -> None:
        payload, sent = int(BATCH_BYTES), int(BATCH_BYTES / self.figures[codec].ratio)
        if down:
            choice.note_encoded(
                codec, payload_bytes=payload, encoded_bytes=sent, seconds=work * GROUPS
            )
            choice.note_sent(sent_bytes=sent, seconds=move * GROUPS)
        else:
            choice.note_decoded(codec, payload_bytes=payload, seconds=work * GROUPS)
            choice.note_received(received_bytes=sent, seconds=move * GROUPS)


def play(link: Link, choice: CodecChoice, batches: int) -> float:
    """Seconds of so many batches, trials included."""
    total = 0.0
    for _ in range(batches):
        codec = choice.choose(int(BATCH_BYTES))
        tried = choice.take_trial()
        total += link.batch(codec, choice)
        if tried is not None:
            total += link.trial(tried, choice)
    return total


def choice_of() -> CodecChoice:
    return CodecChoice([NONE, LZ4, ZSTD], groups_a_batch=GROUPS)


def test_blocks_go_as_they_are_over_a_fast_link() -> None:
    choice = choice_of()
    play(Link(BF16, 5.0), choice, 50)
    assert choice.chosen == NONE


def test_bf16_goes_through_zstd_over_a_slow_link() -> None:
    choice = choice_of()
    play(Link(BF16, 0.2), choice, 50)
    assert choice.chosen == ZSTD


def test_fp8_goes_as_it_is_where_the_gain_would_be_eaten_up() -> None:
    choice = choice_of()
    play(Link(FP8, 1.2), choice, 50)
    assert choice.chosen == NONE


@pytest.mark.parametrize("figures", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "gigabytes", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.3, 2.0, 3.0, 5.0, 10.0]
)
def test_it_is_never_a_tenth_worse_than_the_best_fixed_codec(
    figures: dict[int, Figures], gigabytes: float
) -> None:
    best = min(
        sum(Link(figures, gigabytes, seed).batch(codec) for seed in range(200)) for codec in figures
    )
    took = play(Link(figures, gigabytes), choice_of(), 200)
    assert took < 1.10 * best


def test_a_link_that_changes_is_noticed() -> None:
    choice, link = choice_of(), Link(BF16, 5.0)
    for gigabytes, wanted in ((5.0, NONE), (0.2, ZSTD), (5.0, NONE)):
        link.gigabytes = gigabytes
        play(link, choice, 150)
        assert choice.chosen == wanted


def test_blocks_that_compress_worse_than_before_are_noticed() -> None:
    choice, link = choice_of(), Link(BF16, 0.4)
    play(link, choice, 50)
    assert choice.chosen == ZSTD
    link.figures = {**BF16, ZSTD: Figures(0.3, 0.6, 1.0)}
    play(link, choice, 150)
    assert choice.chosen != ZSTD


def test_a_hopeless_codec_is_tried_ever_more_seldom() -> None:
    choice, link = choice_of(), Link(BF16, 5.0)
    tries = 0
    for _ in range(1000):
        codec = choice.choose(int(BATCH_BYTES))
        tried = choice.take_trial()
        link.batch(codec, choice)
        if tried is not None:
            tries += 1
            link.trial(tried, choice)
    assert 2 < tries < 20, "32 GB of payload"


def test_nothing_is_tried_before_the_link_is_known() -> None:
    choice = choice_of()
    assert choice.choose(1000) == NONE
    assert choice.take_trial() is None
