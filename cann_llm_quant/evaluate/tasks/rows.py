"""Rows of the hub's datasets, and of prepared local files, as questions: one short reader for each layout.

A prepared row has `context`, `choices` and `answer` (an index), or `context` and `target`; WinoGrande's have
`contexts` and `continuation`. Their context is the prompt as it is to be put; only tasks whose choices are letters
write it anew from the question inside.
"""

import re
from collections.abc import Callable, Mapping

from cann_llm_quant.corpus.readers import Row
from cann_llm_quant.errors import CorpusError
from cann_llm_quant.evaluate.tasks.items import Question
from cann_llm_quant.shown import shown

Reader = Callable[[Row], Question]

FRAME = re.compile(r"(?:Question: |问题：)(.*)\n(?:Answer:|答案：)", re.DOTALL)
BRACKETED = re.compile(r"\[.*?\]")
LETTERS = "ABCDE"


def labelled(row: Row, question: str = "question") -> Question:
    """ARC, CommonsenseQA: `choices` {text, label} and `answerKey`."""
    choices = _mapping(row, "choices")
    labels = [str(label) for label in _list(row, "choices.label", choices.get("label"))]
    key = _text(row, "answerKey").strip()
    if key not in labels:
        raise CorpusError(f"{row.place}: answerKey {shown(key)} is none of the labels {', '.join(labels)}")
    return Question({"question": _text(row, question)}, _texts(row, "choices.text", choices["text"]), labels.index(key))


def openbookqa(row: Row) -> Question:
    """`question_stem` beside ARC's fields."""
    return labelled(row, "question_stem")


def indexed(row: Row) -> Question:
    """MMLU: `question`, a list of `choices` and `answer`, an index."""
    choices = _texts(row, "choices", row.values.get("choices"))
    return Question({"question": _text(row, "question")}, choices, _index(row, "answer", len(choices)))


def lettered(row: Row) -> Question:
    """C-Eval and CMMLU: `A` to `D` and the right one's letter; CMMLU writes the other names in capitals."""
    capital = "Question" in row.values
    letter = _text(row, "Answer" if capital else "answer").strip()
    if letter not in ("A", "B", "C", "D"):
        raise CorpusError(f"{row.place}: the answer {shown(letter)} is not one of A, B, C, D")
    choices = tuple(_text(row, name) for name in "ABCD")
    return Question({"question": _text(row, "Question" if capital else "question")}, choices, "ABCD".index(letter))


def sciq(row: Row) -> Question:
    """`support` is the passage; the right answer is the last choice."""
    names = ("distractor1", "distractor2", "distractor3", "correct_answer")
    parts = {"passage": _text(row, "support").lstrip(), "question": _text(row, "question")}
    return Question(parts, tuple(_text(row, name) for name in names), 3)


def piqa(row: Row) -> Question:
    """`goal`, two solutions and `label`."""
    return Question({"question": _text(row, "goal")}, (_text(row, "sol1"), _text(row, "sol2")), _index(row, "label", 2))


def boolq(row: Row) -> Question:
    """`passage`, `question` and `label`: 0 is no."""
    parts = {"passage": _text(row, "passage"), "question": _text(row, "question")}
    return Question(parts, ("no", "yes"), _index(row, "label", 2))


def copa(row: Row) -> Question:
    """`premise` without its full stop, a connective, and two sentences that go on in lower case."""
    kind = _text(row, "question")
    connectives = {"cause": "because", "effect": "therefore"}
    if kind not in connectives:
        raise CorpusError(f"{row.place}: question {shown(kind)} is neither cause nor effect")
    choices = tuple(text[0].lower() + text[1:] for text in (_text(row, "choice1"), _text(row, "choice2")))
    context = f"{_text(row, 'premise').strip()[:-1]} {connectives[kind]}"
    return Question({"context": context}, choices, _index(row, "label", 2))


def hellaswag(row: Row) -> Question:
    """`activity_label`, `ctx_a`, `ctx_b`, four `endings`; the marks of WikiHow's pages are taken out."""
    ctx_b = row.values.get("ctx_b")
    context = f"{_text(row, 'activity_label')}: {_text(row, 'ctx_a')} {str(ctx_b or '').capitalize()}"
    endings = tuple(_without_marks(text) for text in _texts(row, "endings", row.values.get("endings")))
    return Question({"context": _without_marks(context)}, endings, _index(row, "label", len(endings)))


def winogrande(row: Row) -> Question:
    """A `sentence` with a blank `_` and two options for it; the rest of the sentence is what is scored."""
    before, blank, after = _text(row, "sentence").partition("_")
    if not blank or not after.strip():
        raise CorpusError(f"{row.place}: the sentence has no blank _ with text behind it")
    answer = _text(row, "answer")
    if answer not in ("1", "2"):
        raise CorpusError(f"{row.place}: the answer {shown(answer)} is neither 1 nor 2")
    contexts = tuple(before + _text(row, name) for name in ("option1", "option2"))
    return Question({}, (after.strip(),), int(answer) - 1, contexts)


def lambada(row: Row) -> Question:
    """`text`, whose last word is to be guessed."""
    context, space, word = _text(row, "text").rpartition(" ")
    if not space or not word:
        raise CorpusError(f"{row.place}: the text has no last word behind a space")
    return Question({"context": context}, (word,), 0)


def is_prepared(row: Row) -> bool:
    """Whether a row has the layout of prepared local files."""
    return "context" in row.values and ("choices" in row.values or "target" in row.values)


def prepared(row: Row, letters: bool) -> Question:
    """A prepared row; with `letters`, the question is taken out of its frame."""
    subject = row.values.get("subject")
    name = subject if isinstance(subject, str) else None
    if "target" in row.values:
        return Question({"context": _text(row, "context")}, (_text(row, "target").strip(),), 0, subject=name)
    choices = _texts(row, "choices", row.values["choices"])
    answer = _index(row, "answer", len(choices))
    if "contexts" in row.values:
        contexts = _texts(row, "contexts", row.values["contexts"])
        if len(contexts) != len(choices):
            raise CorpusError(f"{row.place}: {len(choices)} choices and {len(contexts)} contexts")
        return Question({}, (_text(row, "continuation").strip(),), answer, contexts, name)
    context = _text(row, "context")
    if not letters:
        return Question({"context": context}, choices, answer, subject=name)
    framed = FRAME.fullmatch(context)
    return Question({"question": framed[1] if framed else context}, choices, answer, subject=name)


def _without_marks(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return BRACKETED.sub("", text).replace("  ", " ")


def _text(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str):
        raise CorpusError(f"{row.place}: {shown(name)} holds {type(value).__name__} where text belongs")
    return value


def _mapping(row: Row, name: str) -> Mapping[str, object]:
    value = row.values.get(name)
    if not isinstance(value, dict) or "text" not in value:
        raise CorpusError(f"{row.place}: {shown(name)} is not an object with text and label")
    return value


def _list(row: Row, name: str, value: object) -> list[object]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{row.place}: {shown(name)} is not a list")
    return value


def _texts(row: Row, name: str, value: object) -> tuple[str, ...]:
    texts = _list(row, name, value)
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise CorpusError(f"{row.place}: {shown(name)} holds {shown(text)} where text belongs")
    return tuple(str(text) for text in texts)


def _index(row: Row, name: str, count: int) -> int:
    """A number from 0 to `count` - 1; some datasets write it as text."""
    value = row.values.get(name)
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise CorpusError(f"{row.place}: {shown(name)} is {shown(value)}, not an index below {count}")
    return number
