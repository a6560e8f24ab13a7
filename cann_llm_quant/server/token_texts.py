"""Single tokens as text, for lists of log-probabilities."""

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The text of one token in the middle of others: a decoder strips the space of a first word, so one goes before."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        ids: list[int] = tokenizer.encode("a", add_special_tokens=False, verbose=False)
        self._before = ids[-1:]
        self._length = len(self._decode(self._before))

    def __call__(self, token: int) -> str:
        """Its text; U+FFFD stands for bytes that are no whole character."""
        return self._decode([*self._before, token])[self._length :]

    def utf8(self, token: int) -> list[int] | None:
        """Its bytes, None where the text does not tell them."""
        text = self(token)
        return None if REPLACEMENT in text else list(text.encode("utf-8"))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
