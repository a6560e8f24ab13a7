"""Which tokens are numbers or begin names, judged by the token alone: pages of the KV cache that hold one may stay in
float.

numbers   the token's text has a decimal digit of any script. Numerals that are words or ideographs (seven, 七) are not
          seen.
names     the token starts a word, its first letter is a capital, and the word is none of the English words below, which
          are capitalised for standing first in a sentence. A token is a piece of a word more often than a word: ` Con`
          counts because of Connor and in spite of Considering. A word starts where the vocabulary marks it (a space
          before it, or a piece that continues no other), so that the first word of a line is missed.

Scripts without capitals (Chinese, Japanese, Korean, Arabic, Hebrew, the scripts of India) have no names in this sense,
and in German every noun is one. Special tokens are in no class.
"""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.errors import UsageError

CLASSES = ("numbers", "names")
_MARKS = ("Ġ", "▁")
_CONTINUES = "##"

# Words that open sentences: articles, pronouns, prepositions, conjunctions, auxiliaries, question words, adverbs.
_COMMON_WORDS = """
a about above according actually after again all almost also although always am among an and another any anyone are
around as at because been before being below between both but by can could despite did do does done down during each
either even ever every everyone everything finally first for from further generally given had has have having he hence
her here hers him his how however i if in indeed instead into is it its itself just last later least less let like
many may maybe me might more moreover most much must my near nearly neither never nevertheless next no nor not nothing
now of off often on once one only or other others our out over perhaps please rather recently same second she should
similarly since so some someone something sometimes soon still such than that the their them then there therefore
these they third this those though through thus to together too toward towards two under unless unlike until up upon
us usually very was we well were what whatever when where whether which while who whom whose why will with within
without would yes yet you your
"""
COMMON_WORDS = frozenset(_COMMON_WORDS.split())


def sensitive_ids(tokenizer: PreTrainedTokenizerBase, classes: Collection[str]) -> frozenset[int]:
    """Ids of the tokens in any of `classes`. Raises UsageError for a class that is none."""
    unknown = [name for name in classes if name not in CLASSES]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no class of tokens; choose from {', '.join(CLASSES)}")
    if not classes:
        return frozenset()
    special = set(tokenizer.all_special_ids)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    starts = _word_starts(pieces)
    return frozenset(
        token
        for token, text, start in zip(ids, texts, starts, strict=True)
        if ("numbers" in classes and _has_digit(text)) or ("names" in classes and start and _is_name(text))
    )


def _word_starts(pieces: list[str]) -> list[bool]:
    """Whether each piece starts a word, by the mark that this vocabulary uses; without any, all do."""
    for mark in _MARKS:
        if any(piece.startswith(mark) for piece in pieces):
            return [piece.startswith(mark) for piece in pieces]
    return [not piece.startswith(_CONTINUES) for piece in pieces]


def _has_digit(text: str) -> bool:
    return any(character.isdecimal() for character in text)


def _is_name(text: str) -> bool:
    word = text.strip()
    return bool(word) and (word[0].isupper() or word[0].istitle()) and word.lower() not in COMMON_WORDS
