"""Token ids to text, piece by piece, without breaking characters and without decoding the whole text again.

A byte-level token may end inside a character, which decodes to a trailing U+FFFD until its other bytes
arrive: up to `MAX_HELD` of those (a character's first three bytes) are withheld, older ones are truly
invalid and shown. Each new token is decoded together with at most `2 * CONTEXT` tokens before it. They also
keep what a decoder strips at the start of a text (the space of a first SentencePiece word) away from the
text's middle; the stream starts with the prompt's end as context.
"""

from collections.abc import Callable, Sequence

CONTEXT = 8
MAX_HELD = 3
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of tokens that follow `prompt`; `decode` turns a short run of ids into text."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT:])
        self._shown = len(decode(self._ids)) if self._ids else 0

    def push(self, token: int) -> str:
        """The characters that this token completes, possibly none."""
        self._ids.append(token)
        text = self._decode(self._ids)
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        ready = len(text) - min(trailing, MAX_HELD)
        new = text[self._shown : ready]
        self._shown = max(self._shown, ready)
        if len(self._ids) >= 2 * CONTEXT:
            withheld = len(text) - self._shown
            self._ids = self._ids[-CONTEXT:]
            self._shown = len(self._decode(self._ids)) - withheld
        return new

    def finish(self) -> str:
        """What is still withheld: an incomplete character, as U+FFFD."""
        text = self._decode(self._ids)
        new, self._shown = text[self._shown :], len(text)
        return new
