"""What a check of an output finds: a fault in one line, and remarks that are no faults."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cann_llm_quant.errors import CannQuantError
from cann_llm_quant.shown import shown_name

SHOWN = 5  # names of a list that a message spells out

Tick = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finding:
    """One fault: `what` is wrong, `where` (file, tensor, field), and what to do."""

    what: str
    where: str
    advice: str

    def line(self) -> str:
        """The finding on one line."""
        return f"{self.where}: {self.what}" + (f"; {self.advice}" if self.advice else "")


@dataclass
class Findings:
    """Faults and remarks in the order in which checks came upon them."""

    faults: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, where: str, what: str, advice: str) -> None:
        """Note a fault, once."""
        finding = Finding(what, where, advice)
        if finding not in self.faults:
            self.faults.append(finding)

    def remark(self, text: str) -> None:
        """Note what is no fault, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    @contextmanager
    def caught(self, where: str) -> Iterator[None]:
        """Turn a refusal of the block inside into a fault; its message says what to do already."""
        try:
            yield
        except CannQuantError as error:
            self.add(where, str(error).removeprefix(f"{where}: "), "")


def listed(names: Sequence[str]) -> str:
    """The first few of the names, and how many more there are."""
    first = ", ".join(map(shown_name, names[:SHOWN]))
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"
