"""Regular expressions that come with a model, compiled only where matching them ends.

A config of another tool names linears by patterns, and whoever wrote it may have meant harm or nothing at all. Python's
`re` tries every way in which a repeated part can be divided up, so that `(.*)*!` takes longer than anyone waits for.
Here a repeated group may hold neither a repeat nor a choice, which leaves one way to divide it; patterns of real
models have none that does.
"""

import re
import warnings

from cann_llm_quant.errors import CheckpointError, UnsupportedError

_LONGEST = 10_000
# One escaped character, a set of characters, or any other character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REPEATS = ("*", "+", "{")


def foreign_pattern(text: str, where: str) -> re.Pattern[str]:
    """The pattern `text`; `where` names its field in messages.

    Raises CheckpointError when it is no regular expression, UnsupportedError when matching it might not end.
    """
    if len(text) > _LONGEST:
        raise UnsupportedError(f"{where}: a pattern of {len(text)} characters is not read; shorten it")
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what a later Python might read differently
            compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {shown!r} is no regular expression: {error}; correct it") from error
    if _repeats_a_choice(text):
        raise UnsupportedError(
            f"{where}: {shown!r} repeats a group that holds a repeat or a choice, and may take forever to match; "
            "write it without"
        )
    return compiled


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
