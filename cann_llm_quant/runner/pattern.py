"""The sparse attention pattern that a user names: `local_window_256+global_first_last`.

A query at position i sees the keys of the last 256 positions, its own included, and those of the first tokens of the
text, which every query sees (attention sinks: StreamingLLM, 2309.17453, found that four suffice; another number is
written behind, `…first_last_16`). "Last" is what the window holds: in causal attention the newest tokens are the only
last ones there are. Keys outside are never seen again, so their pages are given back and memory stops growing.

    key j is seen by query i   iff   j <= i   and   (j < first   or   j > i - window)
"""

import re

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.runner.spans import Pattern

FIRST = 4
_FORM = re.compile(r"local_window_(\d{1,9})(?:\+global_first_last(?:_(\d{1,9}))?)?")


def parse_pattern(text: str) -> Pattern | None:
    """The pattern; None for `dense`. Raises UsageError for any other text."""
    if text == "dense":
        return None
    match = _FORM.fullmatch(text)
    if match is None or not int(match[1]):
        raise UsageError(
            f"attention pattern {text!r} is unknown; write dense, local_window_N, local_window_N+global_first_last, or "
            "local_window_N+global_first_last_M for M tokens that all see"
        )
    first = 0 if "+" not in text else FIRST if match[2] is None else int(match[2])
    return Pattern(int(match[1]), first)


def widest_window(arch: Arch) -> Pattern | None:
    """What a model's own sliding windows leave visible, where every layer has one."""
    windows = [layer.window for layer in arch.layers]
    return Pattern(max(w for w in windows if w is not None), 0) if windows and None not in windows else None
