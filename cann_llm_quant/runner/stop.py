"""When generation ends: end-of-sequence ids from every file that names some, and stop texts.

A stop text can arrive split over tokens, so the longest tail of the text that could still become one is
withheld. Of several matches the one that is complete first wins, and the longest of those; the outcome
depends on the text alone, not on how it was cut into pieces. Nothing before the match is lost, and what is
withheld when the text ends is given out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cann_llm_quant.models.config_fields import token_ids


def end_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer_eos: int | None
) -> frozenset[int]:
    """Union of the end-of-sequence ids that the model's files name; each may be an integer, a list or absent.

    Raises CheckpointError for anything else.
    """
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for file, document in (("config.json", config), ("generation_config.json", generation_config)):
        found.update(token_ids(document, "eos_token_id", file))
    return frozenset(found)


class StopTexts:
    """Text in, text out up to the first stop text."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops = tuple(stops)
        self.include = include
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown now; sets `stopped` when a stop text was completed (its text is shown if `include`).."""
        self._held += text
        matches = [(start + len(stop), start) for stop in self.stops if (start := self._held.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.stopped = True
            shown, self._held = self._held[: end if self.include else start], ""
            return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """The withheld tail, once no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop text."""
        return max((_overlap(self._held, stop) for stop in self.stops), default=0)


def _overlap(text: str, stop: str) -> int:
    lengths: Iterable[int] = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
