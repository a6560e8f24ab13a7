"""Lists of weight schemes as a user types them: `W4g64,W3g64a,W8,float`."""

from cann_llm_quant.errors import UsageError


def named_schemes(text: str, option: str) -> tuple[str, ...]:
    """The schemes of a list, each once, in order.

    Raises UsageError, naming the option, for an empty list and for a name that is no scheme.
    """
    from cann_llm_quant.recipe import parse_candidate

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{option} names no scheme; write for example W4g64,W8")
    for name in names:
        try:
            parse_candidate(name)
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
    return names
