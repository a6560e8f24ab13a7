"""How a recipe names modules: a full name, `glob:` with shell wildcards or `re:` with a regular expression, each for
the whole name.
"""

import fnmatch
import re
from collections.abc import Callable

from cann_llm_quant.errors import UsageError


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """A predicate on full module names for a full name, `glob:` or `re:` pattern.

    Raises UsageError for an invalid regular expression, with the position.
    """
    if pattern.startswith("re:"):
        try:
            compiled = re.compile(pattern[3:])
        except re.error as error:
            raise UsageError(
                f"pattern {pattern!r} is no regular expression: {error.msg} at position {error.pos}"
            ) from error
        return lambda name: compiled.fullmatch(name) is not None
    if pattern.startswith("glob:"):
        return lambda name: fnmatch.fnmatchcase(name, pattern[5:])
    return lambda name: name == pattern
