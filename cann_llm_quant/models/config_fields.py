"""Reading a `config.json` field by field, with every complaint in one line that names the file and the field.

A `config.json` is untrusted data written by many tools: a field may be missing, null, of another type, or present
under two names. What is missing is either derived from tensor shapes (sizes), or takes the value that the format
defines for an absent field; a library's class default is never used for a size.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.shown import shown, shown_name

_ABSENT = object()
_BEYOND = 1 << 63  # no count of a model takes more than 64 bits


@dataclass(frozen=True)
class ConfigFields:
    """A parsed `config.json` and where it came from, for messages."""

    values: Mapping[str, Any]
    where: str = "config.json"

    def given(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number under the first of `names` (the others are aliases), else `default`.

        Raises CheckpointError when it is absent without a default, no whole number, too small, or contradicts an alias.
        """
        value = self.optional_integer(*names, minimum=minimum)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where} lacks {names[0]}; add it with the model's value")
        return default

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        """As `integer`, but None for an absent or null field."""
        found = self._aliased(*names)
        if found is _ABSENT:
            return None
        # JSON writers of some tools turn 4096 into 4096.0
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise CheckpointError(
                f"{self.where}: {names[0]} must be a whole number of at least {minimum}, found {shown(found)}"
            )
        if found >= _BEYOND:
            raise CheckpointError(f"{self.where}: {names[0]} is {shown(found)}, beyond any model's; correct it")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number, else `default`. Raises CheckpointError as `integer` does."""
        found = self._aliased(name)
        if found is _ABSENT:
            if default is None:
                raise CheckpointError(f"{self.where} lacks {name}; add it with the model's value")
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= sys.float_info.max:
            raise CheckpointError(f"{self.where}: {name} must be a positive number, found {shown(found)}")
        return float(found)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean, else `default`. Raises CheckpointError for another type."""
        value = self.optional_flag(name)
        return default if value is None else value

    def optional_flag(self, name: str) -> bool | None:
        """A boolean, or None for an absent or null field. Raises CheckpointError for another type."""
        found = self._aliased(name)
        if found is _ABSENT:
            return None
        if not isinstance(found, bool):
            raise CheckpointError(f"{self.where}: {name} must be true or false, found {shown(found)}")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        """A string, else `default`. Raises CheckpointError when absent without a default or of another type."""
        found = self._aliased(name)
        if found is _ABSENT:
            if default is None:
                raise CheckpointError(f"{self.where} lacks {name}; add it with the model's value")
            return default
        if not isinstance(found, str):
            raise CheckpointError(f"{self.where}: {name} must be a string, found {shown(found)}")
        return found

    def items(self, name: str) -> list[Any]:
        """A list, empty for an absent or null field. Raises CheckpointError for another type."""
        found = self._aliased(name)
        if found is _ABSENT:
            return []
        if not isinstance(found, list | tuple):
            raise CheckpointError(f"{self.where}: {name} must be a list, found {shown(found)}")
        return list(found)

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object as fields of its own, None for an absent or null field. Raises CheckpointError otherwise."""
        found = self._aliased(name)
        if found is _ABSENT:
            return None
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self.where}: {shown_name(name)} must be an object, found {shown(found)}")
        return ConfigFields(found, f"{self.where}: {shown_name(name)}")

    def size(self, *names: str, found: int | None, source: str) -> int:
        """A size that the tensors show as well: `found` in the tensor `source` (None: that tensor is missing).

        Raises CheckpointError when the config says another number, or neither side tells.
        """
        said = self.optional_integer(*names)
        if said is None:
            if found is None:
                raise CheckpointError(f"{self.where} lacks {names[0]} and tensor {source} is missing")
            return found
        if found is not None and said != found:
            raise CheckpointError(
                f"{self.where} says {names[0]}={said}, but tensor {source} has {found}; one of the files is wrong"
            )
        return said

    def _aliased(self, *names: str) -> Any:
        """The value under any of the names; the sentinel when all are absent; an error when two disagree."""
        present = [(name, self.values[name]) for name in names if self.given(name)]
        if not present:
            return _ABSENT
        for name, value in present[1:]:
            if value != present[0][1]:
                raise CheckpointError(
                    f"{self.where}: {present[0][0]}={shown(present[0][1])} contradicts {name}={shown(value)}; "
                    "remove one of them"
                )
        return present[0][1]


def token_ids(document: Mapping[str, Any], name: str, where: str) -> list[int]:
    """The tokens that a field names, one or several, in their order; none where it is absent or null.

    Raises CheckpointError for anything else than whole numbers.
    """
    named = document.get(name)
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in ids):
        raise CheckpointError(f"{where}: {name} {shown(named)} is neither an integer nor a list of integers")
    return ids
