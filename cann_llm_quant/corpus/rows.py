"""Rows of data to documents: which column holds the text, and how a chat is written out.

Looked for, in this order: `text`, `content`; `messages` [{role, content}]; `conversations` [{from, value}];
`prompt` and `response` (or `completion`); `instruction`, `input`, `output`. Chats go through the model's template where
there is one, else their parts are joined by blank lines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus.readers import Row
from cann_llm_quant.errors import CorpusError
from cann_llm_quant.tokenizer import chat_text, has_chat_template

Messages = list[dict[str, str]]
Values = Mapping[str, object]

TEXT_COLUMNS = ("text", "content")
CHAT_COLUMNS = ("messages", "conversations")
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}

TEMPLATE_DATE = date(2024, 7, 26)  # templates print today's date; a calibration must not depend on the day it runs


class MalformedRowError(Exception):
    """A row whose value is neither text nor a chat; counted, not raised to the user."""


@dataclass
class RowCounts:
    """What became of the rows; every row read is used, unused or dropped for one reason."""

    read: int = 0
    null: int = 0
    empty: int = 0
    malformed: int = 0
    first_malformed: str | None = None
    layout: str | None = None
    templated: bool = False


@dataclass
class Documents:
    """Texts out of rows, one after another, counting what it meets."""

    rows: Iterable[Row]
    column: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    keep_empty: bool = False
    counts: RowCounts = field(default_factory=RowCounts)

    def __iter__(self) -> Iterator[str]:
        """The documents that hold any text; the layout is settled by the first row."""
        counts = self.counts
        layout: Layout | None = None
        for row in self.rows:
            counts.read += 1
            if layout is None:
                layout = find_layout(row, self.column)
                counts.templated = layout.templated(self.tokenizer)
                counts.layout = layout.describe(self.tokenizer)
            try:
                text = layout.text(row.values, self.tokenizer)
            except (MalformedRowError, CorpusError) as error:
                counts.malformed += 1
                counts.first_malformed = counts.first_malformed or f"{row.place}: {error}"
                continue
            if text is None:
                counts.null += 1
            elif not text.strip() and not self.keep_empty:
                counts.empty += 1
            else:
                yield text


@dataclass(frozen=True)
class Layout:
    """The columns that are read and, for chats, what turns their values into messages."""

    columns: tuple[str, ...]
    messages: Callable[[Values], Messages] | None = None

    def templated(self, tokenizer: PreTrainedTokenizerBase | None) -> bool:
        """Whether rows are chats that the model's template writes."""
        return self.messages is not None and tokenizer is not None and has_chat_template(tokenizer)

    def describe(self, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The columns and how they are written, for the report."""
        names = "+".join(self.columns)
        if self.messages is None:
            return names
        return f"{names} ({'chat template' if self.templated(tokenizer) else 'joined plainly, no chat template'})"

    def text(self, values: Values, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
        """The row's document, None where its value is null."""
        if any(values.get(column) is None for column in self.columns):
            return None
        if self.messages is None:
            value = values[self.columns[0]]
            if not isinstance(value, str):
                raise MalformedRowError(f"column '{self.columns[0]}' holds {type(value).__name__}, not text")
            return value
        messages = self.messages(values)
        if all(not message["content"].strip() for message in messages):
            return ""
        if tokenizer is not None and has_chat_template(tokenizer):
            return chat_text(tokenizer, messages, today=TEMPLATE_DATE)
        return "\n\n".join(message["content"] for message in messages)


def find_layout(row: Row, column: str | None) -> Layout:
    """How rows such as this one are read; CorpusError lists the columns if none is known."""
    names = list(row.values)
    if column is not None:
        if column not in names:
            raise CorpusError(f"{row.place} has no column '{column}': its columns are {_listed(names)}")
        return _column_layout(column, row.values[column])
    for name in TEXT_COLUMNS + CHAT_COLUMNS:
        if name in names:
            return _column_layout(name, row.values[name])
    for question, answer in PAIRS:
        if question in names and answer in names:
            return Layout((question, answer), partial(_pair, question, answer))
    raise CorpusError(f"{row.place} has columns {_listed(names)}: say which one holds the text with column=NAME")


def _column_layout(name: str, value: object) -> Layout:
    if isinstance(value, list) or (value is None and name in CHAT_COLUMNS):
        return Layout((name,), lambda values: _chat(values[name]))
    return Layout((name,))


def _chat(value: object) -> Messages:
    if not isinstance(value, list) or not value:
        raise MalformedRowError(f"a chat is a list of messages, not {type(value).__name__}")
    return [_message(item) for item in value]


def _message(item: object) -> dict[str, str]:
    if isinstance(item, dict):
        for speaker, said in (("role", "content"), ("from", "value")):
            role, content = item.get(speaker), _content(item.get(said))
            if isinstance(role, str) and content is not None:
                return {"role": SPEAKERS.get(role, role), "content": content}
    raise MalformedRowError("a message needs role and content, or from and value, as text")


def _content(value: object) -> str | None:
    """A message's text; the text parts of a message made of parts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
        return "\n".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else None


def _pair(question: str, answer: str, values: Values) -> Messages:
    asked, said, more = values[question], values[answer], values.get("input")
    if isinstance(asked, list):  # conversational prompt/completion: both are lists of messages
        return _chat(asked) + _chat(said)
    if not (isinstance(asked, str) and isinstance(said, str) and isinstance(more, str | None)):
        raise MalformedRowError(f"'{question}', '{answer}' and 'input' must be text")
    if question == "instruction" and more and more.strip():
        asked = f"{asked}\n\n{more}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) if names else "none"
