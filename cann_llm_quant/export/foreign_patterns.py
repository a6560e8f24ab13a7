"""Regular expressions that come with a model, compiled only where matching them ends.

A config of another tool names linears by patterns, and whoever wrote it may have meant harm or nothing at all. Python's
`re` tries every way in which a repeated part can be divided up, so that `(.*)*!` takes longer than anyone waits for.
Here a repeated group may hold neither a repeat nor a choice, which leaves one way to divide it; patterns of real
models have none that does. What stands side by side multiplies too: each repeat by the length of a name, each choice by
two, so that only so many of either are read.
"""

import re
import warnings
from itertools import pairwise

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

_LONGEST = 10_000
# `.*` four times takes a quarter of a second on a name of 200 characters, a fifth would take ten.
_MOST_REPEATS, _MOST_CHOICES = 4, 12
# One escaped character, a set of characters, or any other character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REPEATS = ("*", "+", "{")


def foreign_pattern(text: str, where: str) -> re.Pattern[str]:
    """The pattern `text`; `where` names its field in messages.

    Raises CheckpointError when it is no regular expression, UnsupportedError when matching it might not end.
    """
    if len(text) > _LONGEST:
        raise UnsupportedError(f"{where}: a pattern of {len(text)} characters is not read; shorten it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what a later Python might read differently
            compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {shown(text)} is no regular expression: {error}; correct it") from error
    if _repeats_a_choice(text):
        raise UnsupportedError(
            f"{where}: {shown(text)} repeats a group that holds a repeat or a choice, and may take forever to match; "
            "write it without"
        )
    repeats, choices = _counted(text)
    if repeats > _MOST_REPEATS or choices > _MOST_CHOICES:
        raise UnsupportedError(
            f"{where}: {shown(text)} has {repeats} repeats and {choices} choices, more than the {_MOST_REPEATS} and "
            f"{_MOST_CHOICES} that are matched in time; write it with fewer"
        )
    return compiled


def _counted(text: str) -> tuple[int, int]:
    """Repeats (of digits alone not: a name has few together), and optional parts and groups with alternatives."""
    pieces = _PIECE.findall(text)
    repeats = choices = 0
    alternatives = [False]
    for before, piece in pairwise(["", *pieces]):
        if piece in _REPEATS:
            repeats += before != r"\d"
        elif piece == "?":
            choices += before not in ("(", *_REPEATS)
        elif piece == "(":
            alternatives.append(False)
        elif piece == ")":
            choices += alternatives.pop()
        elif piece == "|":
            alternatives[-1] = True
    return repeats, choices + alternatives.pop()


def _repeats_a_choice(text: str) -> bool:
    """Whether some `(…)*`, `(…)+` or `(…){…}` has a repeat, an optional part or an alternative inside."""
    pieces = _PIECE.findall(text)
    open_groups = [False]
    for place, piece in enumerate(pieces):
        if piece == "(":
            open_groups.append(False)
        elif piece == ")":
            choice = open_groups.pop()
            if choice and pieces[place + 1 : place + 2] in ([repeat] for repeat in _REPEATS):
                return True
            open_groups[-1] |= choice
        elif piece in (*_REPEATS, "|") or (piece == "?" and pieces[place - 1] != "("):
            open_groups[-1] = True
    return False
