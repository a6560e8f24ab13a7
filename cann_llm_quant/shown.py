"""What was read, as a message may repeat it: in quotes, on one line, and no longer than a line is.

Files come from anybody. A value out of them can be 100 kB long, break the line or hold the escape sequences of a
terminal, so that an error that repeats it whole hides what it says.
"""

import reprlib

LIMIT = 80  # characters of a value


def shown(value: object, limit: int = LIMIT) -> str:
    """The value as Python writes it, control characters as escapes; what is past about `limit` characters is left out.

    The work grows with the limit, not with the value.
    """
    if isinstance(value, str):
        if len(value) <= limit:
            return repr(value)
        return f"{value[:limit]!r}… ({len(value)} characters)"
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxlong, brief.maxother = 4, limit, limit, limit
    brief.maxdict = brief.maxlist = brief.maxtuple = brief.maxset = brief.maxfrozenset = 8
    text = brief.repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def shown_name(name: str, limit: int = 200) -> str:
    """A name, or other words out of a file, as it is where it can stand in a message; else as `shown` has it."""
    return name if len(name) <= limit and name.isprintable() else shown(name, limit)
