"""Rows of data to questions: prompts as the harness's task files write them, local files, limits, examples."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hub_rows import HUB_ROWS

from cann_llm_quant.corpus.readers import Row
from cann_llm_quant.errors import CorpusError, UsageError
from cann_llm_quant.evaluate.tasks import TASKS, Item, find_tasks, load_task
from cann_llm_quant.evaluate.tasks.load import to_item


def pairs(item: Item) -> list[tuple[str, str]]:
    return list(zip(item.contexts, item.continuations, strict=True))


def save_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def choice_rows(count: int, word: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"context": f"Question: {word} {i}?\nAnswer:", "choices": ["yes", "no"], "answer": i % 2} | more
        for i in range(count)
    ]


def test_every_task_has_a_row_here() -> None:
    assert set(HUB_ROWS) == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_rows_of_the_hub_become_the_harness_prompts(name: str) -> None:
    row, expected, answer = HUB_ROWS[name]
    task = TASKS[name]
    item = to_item(task, task.read(Row("row 1", row)), "row 1")
    assert pairs(item) == expected
    assert item.answer == answer
    assert item.lengths == tuple(len(continuation.removeprefix(task.delimiter)) for _, continuation in expected)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("mmlu", "ceval", "cmmlu")])
def test_local_files_may_hold_rows_as_the_hub_has_them(name: str, tmp_path: Path) -> None:
    row, expected, answer = HUB_ROWS[name]
    save_rows(tmp_path / f"{name}_{TASKS[name].split}.jsonl", [row])
    (item,) = load_task(TASKS[name], tmp_path).items
    assert (pairs(item), item.answer) == (expected, answer)


def test_prepared_contexts_are_put_as_they_are(tmp_path: Path) -> None:
    save_rows(tmp_path / "sciq_val.jsonl", choice_rows(2, "Is it so"))
    items = load_task(TASKS["sciq"], tmp_path).items
    assert pairs(items[1]) == [("Question: Is it so 1?\nAnswer:", " yes"), ("Question: Is it so 1?\nAnswer:", " no")]
    assert [item.answer for item in items] == [0, 1]


def test_prepared_blanks_and_completions(tmp_path: Path) -> None:
    blank = {"context": "a _ c", "contexts": ["a b", "a d"], "continuation": " c", "choices": ["b", "d"], "answer": 1}
    save_rows(tmp_path / "winogrande_xl_val.jsonl", [blank])
    (item,) = load_task(TASKS["winogrande"], tmp_path).items
    assert (pairs(item), item.answer) == ([("a b", " c"), ("a d", " c")], 1)
    save_rows(tmp_path / "lambada_openai_test.jsonl", [{"context": "and so", "target": " on"}])
    (item,) = load_task(TASKS["lambada_openai"], tmp_path).items
    assert pairs(item) == [("and so", " on")]


def test_prepared_exams_are_written_with_letters(tmp_path: Path) -> None:
    row = {"subject": "law", "context": "问题：何为法？\n答案：", "choices": ["一", "二", "三", "四"], "answer": 2}
    save_rows(tmp_path / "ceval_val.jsonl", [row])
    (item,) = load_task(TASKS["ceval"], tmp_path).items
    preamble = "以下是中国关于法学的单项选择题，请选出其中的正确答案。\n\n"
    assert pairs(item)[2] == (f"{preamble}何为法？\nA. 一\nB. 二\nC. 三\nD. 四\n答案：", " C")


def test_subjects_and_categories_are_complete() -> None:
    counts = {name: len(TASKS[name].subject_table()) for name in ("mmlu", "ceval", "cmmlu")}
    assert counts == {"mmlu": 57, "ceval": 52, "cmmlu": 67}
    for name in counts:
        categories = {category for _, category in TASKS[name].subject_table().values()}
        assert categories == {"stem", "humanities", "social sciences", "other"}
    assert sum(category == "stem" for _, category in TASKS["mmlu"].subject_table().values()) == 19


def test_the_limit_is_of_each_subject(tmp_path: Path) -> None:
    rows = [row for subject in ("anatomy", "virology") for row in choice_rows(5, subject, subject=subject)]
    save_rows(tmp_path / "mmlu_test.jsonl", rows)
    items = load_task(TASKS["mmlu"], tmp_path, limit=2).items
    assert [item.subject for item in items] == ["anatomy", "anatomy", "virology", "virology"]
    assert (
        items[3]
        .contexts[0]
        .startswith(
            "The following are multiple choice questions (with answers) about virology.\n\nvirology 1?\nA. yes\nB. no\n"
        )
    )


def test_exam_examples_are_the_first_of_their_subject(tmp_path: Path) -> None:
    save_rows(tmp_path / "mmlu_test.jsonl", choice_rows(1, "asked", subject="virology"))
    dev = choice_rows(3, "other", subject="anatomy") + choice_rows(3, "example", subject="virology")
    save_rows(tmp_path / "mmlu_dev.jsonl", dev)
    (item,) = load_task(TASKS["mmlu"], tmp_path, shots=2).items
    assert item.contexts[0].partition("\n\n")[2] == (
        "example 0?\nA. yes\nB. no\nAnswer: A\n\n"
        "example 1?\nA. yes\nB. no\nAnswer: B\n\n"
        "asked 0?\nA. yes\nB. no\nAnswer:"
    )
    with pytest.raises(UsageError, match=r"--fewshot 4 is more than the 3 examples"):
        load_task(TASKS["mmlu"], tmp_path, shots=4)


def test_examples_are_drawn_as_the_harness_draws_them(tmp_path: Path) -> None:
    """One `random.Random(1234)` over the questions in order, `sample` from the other file for each."""
    save_rows(tmp_path / "sciq_test.jsonl", choice_rows(6, "asked"))
    save_rows(tmp_path / "sciq_train.jsonl", choice_rows(30, "example"))
    items = load_task(TASKS["sciq"], tmp_path, shots=3).items
    generator = random.Random(1234)
    for item in items:
        drawn = generator.sample(range(30), 3)
        expected = "".join(f"Question: example {i}?\nAnswer: {('yes', 'no')[i % 2]}\n\n" for i in drawn)
        assert item.contexts[0].startswith(f"{expected}Question: asked")
    again = load_task(TASKS["sciq"], tmp_path, shots=3)
    assert again.items == items
    other = load_task(TASKS["sciq"], tmp_path, shots=3, seed=5)
    assert other.sha256 != again.sha256
    assert load_task(TASKS["sciq"], tmp_path, shots=3, limit=4).items == items[:4]


def test_a_question_is_never_its_own_example(tmp_path: Path) -> None:
    save_rows(tmp_path / "sciq_test.jsonl", choice_rows(5, "asked"))
    for number, item in enumerate(load_task(TASKS["sciq"], tmp_path, shots=4).items):
        assert item.contexts[0].count("asked") == 5
        assert item.contexts[0].count(f"asked {number}?") == 1


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["sciq_val.jsonl", "sciq_test.jsonl"], "sciq_test.jsonl"),
        (["sciq_test_full.jsonl.gz", "sciq_test_100.jsonl"], "sciq_test_100.jsonl"),
        (["sciq_train.jsonl", "sciq_val.jsonl"], "sciq_val.jsonl"),
        (["sciq.jsonl", "sciq_more.txt", "other_test.jsonl"], "sciq.jsonl"),
        (["sciq_test.jsonl.gz"], "sciq_test.jsonl.gz"),
    ],
)
def test_which_local_file_is_evaluated(files: list[str], chosen: str, tmp_path: Path) -> None:
    for file in files:
        save_rows(tmp_path / file, choice_rows(1, file))
    data = load_task(TASKS["sciq"], tmp_path)
    assert Path(data.source).name == chosen
    assert chosen in data.items[0].contexts[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"context": "x", "choices": ["a", "b"], "answer": 2},
            r"sciq_test.jsonl:1: 'answer' is 2, not an index below 2",
        ),
        ({"context": "x", "choices": ["a", "b"], "answer": True}, "'answer' is True"),
        ({"context": "x", "choices": ["a", " "], "answer": 0}, "' ' where text belongs"),
        ({"context": "x", "choices": ["a"], "answer": 0}, "no question of sciq: it has 1 choices"),
        ({"context": 3, "choices": ["a", "b"], "answer": 0}, "'context' holds int"),
        ({"context": "x", "target": "y"}, "no question of sciq"),
        ({"words": "x"}, "'support' holds NoneType"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused_by_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_rows(tmp_path / "sciq_test.jsonl", [row])
    with pytest.raises(CorpusError, match=message):
        load_task(TASKS["sciq"], tmp_path)


def test_missing_data_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no questions of piqa: no file piqa\*\.jsonl"):
        load_task(TASKS["piqa"], tmp_path)
    with pytest.raises(CorpusError, match="there is no folder or file"):
        load_task(TASKS["piqa"], tmp_path / "none")
    save_rows(tmp_path / "piqa_val.jsonl", [])
    with pytest.raises(CorpusError, match="holds no question of piqa"):
        load_task(TASKS["piqa"], tmp_path)
    save_rows(tmp_path / "mmlu_test.jsonl", choice_rows(1, "x", subject="alchemy"))
    with pytest.raises(CorpusError, match="'alchemy' is not a subject of mmlu"):
        load_task(TASKS["mmlu"], tmp_path)


def test_without_the_hub_its_dataset_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CorpusError, match="baber/piqa"):
        load_task(TASKS["piqa"], limit=1)


def test_unknown_tasks_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown task 'arc'; known are arc_easy, arc_challenge, .*cmmlu"):
        find_tasks(["sciq", "arc"])
    with pytest.raises(UsageError, match="no task was named"):
        find_tasks([])
    assert [task.name for task in find_tasks(["sciq", "piqa", "sciq"])] == ["sciq", "piqa"]


@pytest.mark.shared
def test_the_shared_files_hold_every_task(shared: Path) -> None:
    folder = shared / "data" / "tasks"
    counts = {name: len(load_task(task, folder, limit=3).items) for name, task in TASKS.items()}
    subjects = {"mmlu": 3 * 57, "ceval": 3 * 52, "cmmlu": 3 * 67}
    assert counts == {name: subjects.get(name, 3) for name in TASKS}
