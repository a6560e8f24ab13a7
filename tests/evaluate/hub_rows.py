"""For every task a row as the hub's dataset has it, the harness's (context, continuation) pairs, and the answer."""

from typing import Any

FOUR = {"text": ["p", "q", "r", "s"], "label": ["A", "B", "C", "D"]}
FIVE = {"text": ["p", "q", "r", "s", "t"], "label": ["A", "B", "C", "D", "E"]}
HUB_ROWS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], int]] = {
    "arc_easy": (
        {"question": "Why?", "choices": FOUR, "answerKey": "C"},
        [("Question: Why?\nAnswer:", f" {letter}") for letter in "pqrs"],
        2,
    ),
    "arc_challenge": (
        {"question": "Why?", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}, "answerKey": "1"},
        [("Question: Why?\nAnswer:", f" {letter}") for letter in "pqr"],
        0,
    ),
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "[header] Bread [title] A man kneads.",
            "ctx_b": "the MAN",
            "endings": ["sings [step] loud.", "runs."],
            "label": "1",
        },
        [("Baking: Bread. A man kneads. The man", " sings loud."), ("Baking: Bread. A man kneads. The man", " runs.")],
        1,
    ),
    "piqa": (
        {"goal": "Open it.", "sol1": "Push.", "sol2": "Pull.", "label": 1},
        [("Question: Open it.\nAnswer:", " Push."), ("Question: Open it.\nAnswer:", " Pull.")],
        1,
    ),
    "winogrande": (
        {"sentence": "Ann saw Bo as _ was tall.", "option1": "Ann", "option2": "Bo", "answer": "2"},
        [("Ann saw Bo as Ann", " was tall."), ("Ann saw Bo as Bo", " was tall.")],
        1,
    ),
    "boolq": (
        {"passage": "It is.", "question": "is it", "label": 1},
        [("It is.\nQuestion: is it?\nAnswer:", " no"), ("It is.\nQuestion: is it?\nAnswer:", " yes")],
        1,
    ),
    "sciq": (
        {"support": " Air.", "question": "Q?", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
        | {"correct_answer": "d"},
        [("Air.\nQuestion: Q?\nAnswer:", f" {letter}") for letter in "abcd"],
        3,
    ),
    "openbookqa": (
        {"question_stem": "The sun is", "choices": FOUR, "answerKey": " D"},
        [("The sun is", f" {letter}") for letter in "pqrs"],
        3,
    ),
    "copa": (
        {"premise": "It rained. ", "question": "effect", "choice1": "We hid.", "choice2": "He ran.", "label": 0},
        [("It rained therefore", "  we hid."), ("It rained therefore", "  he ran.")],
        0,
    ),
    "commonsense_qa": (
        {"question": " Who? ", "choices": FIVE, "answerKey": "E"},
        [("Question: Who?\nA. p\nB. q\nC. r\nD. s\nE. t\nAnswer:", f" {letter}") for letter in "ABCDE"],
        4,
    ),
    "lambada_openai": ({"text": "So it\nwent on"}, [("So it\nwent", " on")], 0),
    "mmlu": (
        {"question": "2 + 2 = ", "choices": ["1", "2", "3", "4"], "answer": 3},
        [("2 + 2 =\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", f" {letter}") for letter in "ABCD"],
        3,
    ),
    "ceval": (
        {"question": "问____。", "A": "一", "B": "二", "C": "三", "D": "四", "answer": "B"},
        [("问____。\nA. 一\nB. 二\nC. 三\nD. 四\n答案：", f" {letter}") for letter in "ABCD"],
        1,
    ),
    "cmmlu": (
        {"Question": "问", "A": "一", "B": "二", "C": "三", "D": "四", "Answer": "A"},
        [("问\nA. 一\nB. 二\nC. 三\nD. 四\n答案：", f" {letter}") for letter in "ABCD"],
        0,
    ),
}
