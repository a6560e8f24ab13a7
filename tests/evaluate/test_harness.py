"""Against lm-evaluation-harness itself, where it is installed: its task files, its scoring loop, our model in it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_rows import HUB_ROWS
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.corpus.readers import Row
from cann_llm_quant.evaluate.choices import answer_items, encode_items, summarize
from cann_llm_quant.evaluate.loglikelihood import Encoder, Scorer
from cann_llm_quant.evaluate.tasks import TASKS, Task, TaskData
from cann_llm_quant.evaluate.tasks.load import to_item, with_examples
from cann_llm_quant.runner.engine import LLMEngine

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm-eval)")

SUBJECTS = {"mmlu": "anatomy", "ceval": "law", "cmmlu": "agronomy"}
ASKS = ("premise", "question_stem", "question", "Question", "goal", "sentence", "text", "activity_label")
FILES = {
    "winogrande": "winogrande/default",
    "boolq": "super_glue/boolq/default",
    "copa": "super_glue/copa/default",
    "commonsense_qa": "commonsense_qa/default",
    "lambada_openai": "lambada/lambada_openai",
    "mmlu": "mmlu/default/mmlu_anatomy",
    "ceval": "ceval/ceval-valid_law",
    "cmmlu": "cmmlu/cmmlu_agronomy",
    "arc_easy": "arc/arc_easy",
    "arc_challenge": "arc/arc_challenge",
}


def harness_task(task: Task, rows: list[dict[str, Any]], examples: list[dict[str, Any]]) -> Any:
    """The harness's own task over these rows."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    loader = pytest.importorskip("lm_eval.tasks._yaml_loader")
    file = Path(lm_eval.__file__).parent / "tasks" / f"{FILES.get(task.name, f'{task.name}/{task.name}')}.yaml"
    config = dict(loader.load_yaml(str(file)))
    assert config["dataset_path"] == task.dataset
    assert (config.get("dataset_name") or None) == SUBJECTS.get(task.name, task.subset)
    splits = {task.split: rows} | ({task.shots_split: examples} if task.shots_split else {})
    config["custom_dataset"] = lambda **_: {name: datasets.Dataset.from_list(found) for name, found in splits.items()}
    config.pop("tag", None)
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.filterwarnings("ignore")
def test_requests_are_the_harness_s(name: str, shots: int) -> None:
    if name == "lambada_openai" and shots:
        pytest.skip("the harness may show a completion as its own example; we do not")
    task = TASKS[name]
    row = HUB_ROWS[name][0]
    asks = next(key for key in ASKS if key in row)
    rows, examples = [row], [row | {asks: f"N{number} {row[asks]}"} for number in range(6)]
    theirs = harness_task(task, rows, examples)
    theirs.set_fewshot_seed(1234)

    def item(values: dict[str, Any], place: str) -> Any:
        return to_item(task, replace(task.read(Row(place, values)), subject=SUBJECTS.get(name)), place)

    pool = [item(values, f"example {number}") for number, values in enumerate(examples)]
    (ours,) = with_examples(task, [item(row, "row")], pool, shots, 1234)
    doc = theirs.eval_docs[0]
    requests = theirs.construct_requests(doc, theirs.fewshot_context(doc, num_fewshot=shots))
    requests = requests if isinstance(requests, list) else [requests]
    assert [request.args for request in requests] == list(zip(ours.contexts, ours.continuations, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", dtype=torch.float32, max_position_embeddings=24)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Any:
    from cann_llm_quant.lm_eval_model import CannLLMQuant

    return CannLLMQuant(str(folder), device="cuda:0" if not torch.cuda.is_available() else "cpu")


def asked(*arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in arguments]


def test_the_harness_finds_the_model(adapter: Any) -> None:
    from lm_eval.api.registry import get_model

    assert isinstance(adapter, get_model("cann_llm_quant"))


def test_its_scores_are_ours(adapter: Any, folder: Path) -> None:
    pairs = [("w5 w6", " w7 w8"), ("w5 w6", " w9"), ("", "w3 w4"), ("w9 " * 30, "w5")]
    engine = LLMEngine(folder)
    encoder = Encoder(engine.tokenizer)
    ours = Scorer(engine.model, engine.max_context).score([encoder.request(*pair) for pair in pairs])
    theirs = adapter.loglikelihood(asked(*pairs), disable_tqdm=True)
    assert theirs == [(pytest.approx(score.logprob, abs=1e-5), score.greedy) for score in ours]


def test_rolling_scores_every_token_once(adapter: Any, folder: Path) -> None:
    """Windows of 24: the second predicts tokens 24 to 39 behind as many tokens as fit."""
    words = [f"w{3 + 7 * i % 120}" for i in range(40)]
    ids = [1, *(3 + 7 * i % 120 for i in range(40))]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for first, last in ((1, 24), (25, 40)):
        start = max(0, last - 24)
        with torch.no_grad():
            log_p = model(torch.tensor([ids[start:last]])).logits[0].double().log_softmax(-1)
        total += sum(float(log_p[position - 1 - start, ids[position]]) for position in range(first, last + 1))
    found = adapter.loglikelihood_rolling(asked((" ".join(words),)), disable_tqdm=True)
    assert found == [pytest.approx(total, abs=1e-3)]


def test_texts_end_before_their_stops(adapter: Any, folder: Path) -> None:
    whole = LLMEngine(folder).generate("w5 w6", 6).text
    stop = whole.split()[2]
    texts = adapter.generate_until(
        asked(("w5 w6", {"max_gen_toks": 6, "until": [stop]}), ("w5 w6", {"max_gen_toks": 6})), disable_tqdm=True
    )
    assert texts == [whole[: whole.index(stop)], whole]


@pytest.mark.filterwarnings("ignore")
def test_a_whole_evaluation_agrees(adapter: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TQDM_DISABLE", "1")
    task = TASKS["piqa"]
    rows = [{"goal": f"w{5 + i}", "sol1": f"w{20 + i} w4", "sol2": f"w{60 - i}", "label": i % 2} for i in range(25)]
    result = lm_eval.evaluate(adapter, {"piqa": harness_task(task, rows, rows)}, bootstrap_iters=0)["results"]["piqa"]
    items = tuple(to_item(task, task.read(Row(f"row {i}", row)), f"row {i}") for i, row in enumerate(rows))
    engine = LLMEngine(folder)
    requests = encode_items(items, Encoder(engine.tokenizer))
    answers = answer_items(items, requests, Scorer(engine.model, engine.max_context))
    ours = summarize(TaskData(task, items, "here", 0, ""), answers)
    for metric, measure in ours.metrics.items():
        assert result[f"{metric},none"] == pytest.approx(measure.value)
