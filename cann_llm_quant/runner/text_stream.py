"""Token ids to text, piece by piece, without breaking characters and without decoding the whole text again.

Two kinds of tokens can end inside a character:

- a byte-level token (GPT-2's kind) decodes to a trailing U+FFFD until its other bytes arrive. Up to `MAX_HELD` of
  those are withheld; older ones are truly invalid and shown.
- a byte token (`<0xE2>`, SentencePiece's fallback) stands for one byte. The tokenizers library replaces a whole run
  of them by U+FFFD while any of its characters is incomplete, so runs are decoded here, byte by byte.

Each other token is decoded together with at most `2 * CONTEXT` tokens before it. They keep what a decoder strips at
the start of a text (the space of a first SentencePiece word) away from the text's middle; the stream starts with the
prompt's end as context.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CONTEXT = 8
MAX_HELD = 3
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Ids of a tokenizer's byte tokens and their bytes; empty where `<0x..>` is plain text or does not exist."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids: list[int | None] = tokenizer.convert_tokens_to_ids(names)
    found = {
        token: byte
        for byte, token in enumerate(ids)
        if token is not None and tokenizer.convert_ids_to_tokens(token) == names[byte]
    }
    letter = next((token for token, byte in found.items() if byte == ord("A")), None)
    return found if letter is not None and tokenizer.decode([letter]) == "A" else {}


class TextStream:
    """The text of tokens that follow `prompt`.

    `decode` turns a short run of ids into text; `byte_of` is what `byte_tokens` returned.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int] = (),
        byte_of: Mapping[int, int] | None = None,
    ) -> None:
        self._decode = decode
        self._byte_of = byte_of or {}
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids = list(prompt[-CONTEXT:])
        self._shown = self._length()
        self._in_run = False

    def push(self, token: int) -> str:
        """The characters that this token completes, possibly none."""
        byte = self._byte_of.get(token)
        if byte is None:
            return self._close_run() + self._push_text(token)
        before = "" if self._in_run else self.finish()
        self._in_run = True
        self._ids = [*self._ids[1 - 2 * CONTEXT :], token]
        return before + self._bytes.decode(bytes([byte]))

    def finish(self) -> str:
        """What is still withheld: an incomplete character, as U+FFFD."""
        if self._in_run:
            return self._close_run()
        text = self._decode(self._ids)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _close_run(self) -> str:
        if not self._in_run:
            return ""
        self._in_run = False
        self._ids = self._ids[-CONTEXT:]
        self._shown = self._length()
        return self._bytes.decode(b"", final=True)

    def _push_text(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        ready = len(text) - min(trailing, MAX_HELD)
        new = text[self._shown : ready]
        self._shown = max(self._shown, ready)
        if len(self._ids) >= 2 * CONTEXT:
            withheld = len(text) - self._shown
            self._ids = self._ids[-CONTEXT:]
            self._shown = self._length() - withheld
        return new

    def _length(self) -> int:
        return len(self._decode(self._ids)) if self._ids else 0
