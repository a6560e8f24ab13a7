"""A question as it is put to a model, and the parts that a row of data contributes to it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Question:
    """What a row says: named parts of the prompt, the choices, which of them is right.

    `contexts` are given where every choice has its own context and all share one continuation, the only choice
    (WinoGrande); `subject` where a task has several.
    """

    parts: Mapping[str, str]
    choices: tuple[str, ...]
    answer: int
    contexts: tuple[str, ...] = ()
    subject: str | None = None


@dataclass(frozen=True)
class Item:
    """A question ready for scoring: the log-likelihoods of `continuations[i]` behind `contexts[i]` are compared.

    `lengths` are the choices' characters, by which `acc_norm` divides; `solved` is the item with its answer, as an
    example for others. A completion has one choice, which is right when greedy decoding writes it.
    """

    name: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    lengths: tuple[int, ...]
    answer: int
    solved: str
    subject: str | None = field(default=None)


def items_sha256(items: Sequence[Item]) -> str:
    """Hex sha256 of everything that is scored: accuracies compare only where it is equal."""
    digest = hashlib.sha256()
    for item in items:
        for text in (*item.contexts, *item.continuations, str(item.answer)):
            encoded = text.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()
