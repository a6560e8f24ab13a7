import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tiny_tokenizers import CHATML, TokenizerMaker
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus import CorpusSource, default_evaluation_source, default_source, load_text, parse_source
from cann_llm_quant.corpus.documents import shuffled
from cann_llm_quant.corpus.readers import Row, read_rows
from cann_llm_quant.corpus.rows import Documents
from cann_llm_quant.corpus.sources import hub_source, local_files
from cann_llm_quant.errors import CorpusError, UsageError


def documents(path: Path, column: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Documents:
    return Documents(read_rows(path), column, tokenizer)


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_source_is_a_name_and_its_options() -> None:
    assert parse_source("a/b.txt") == CorpusSource("a/b.txt")
    assert parse_source("allenai/c4::subset=en,split=validation,column=body,revision=v1,weight=2.5") == CorpusSource(
        "allenai/c4", 2.5, "body", "validation", "en", "v1"
    )


@pytest.mark.parametrize(
    "text",
    ["", "::split=test", "a.txt::weight=0", "a.txt::weight=-1", "a.txt::weight=nan", "a.txt::weight=x",
     "a.txt::size=1", "a.txt::split", "a.txt::split=", "a.txt::split=a,split=b"],
)  # fmt: skip
def test_a_wrong_source_option_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"corpus|namespace/name"):
        parse_source(text)


def test_the_embedded_texts_are_there() -> None:
    for source in (default_source(), default_evaluation_source()):
        assert local_files(source) == [Path(source.spec)]


@pytest.mark.parametrize("spec", ["missing.txt", "./folder", "/nowhere/at/all", "x/y.parquet"])
def test_c45_a_missing_file_is_named(spec: str) -> None:
    with pytest.raises(CorpusError, match="there is no corpus file"):
        local_files(CorpusSource(spec))


def test_c45_the_ending_decides_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_bytes(b"")
    with pytest.raises(CorpusError, match="must end in one of"):
        local_files(CorpusSource(str(tmp_path / "notes.docx")))
    with pytest.raises(CorpusError, match="holds no corpus files"):
        local_files(CorpusSource(str(tmp_path)))


@pytest.mark.parametrize("spec", ["ptb", "ptb_text_only", "wikitext-2", "cnn_dailymail", "a/b/c"])
def test_c46_bare_and_legacy_ids_are_refused_with_the_local_way(spec: str) -> None:
    assert local_files(CorpusSource(spec)) is None
    with pytest.raises(CorpusError, match=r"namespace/name.*wikitext, c4, pile.*local file"):
        hub_source(CorpusSource(spec))


def test_c46_presets_are_namespaced_datasets() -> None:
    assert hub_source(CorpusSource("wikitext", split="test")) == CorpusSource(
        "Salesforce/wikitext", split="test", subset="wikitext-2-raw-v1"
    )
    assert hub_source(CorpusSource("C4", subset="de")).subset == "de"


@pytest.mark.parametrize("ending", [".jsonl", ".json", "-lines.json", "-data.json", ".csv", ".parquet"])
@pytest.mark.parametrize("compressed", [False, True])
def test_c45_every_row_format_gives_the_same_documents(tmp_path: Path, ending: str, compressed: bool) -> None:
    texts = ['one, "quoted"\nline', "zwei 模型", "", "x" * 200_000]
    path = tmp_path / f"rows{ending}"
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    if ending in (".jsonl", "-lines.json"):
        write_lines(path, [*rows, {"id": 9, "text": None}])
    elif ending.endswith(".json"):
        content = [*rows, {"id": 9, "text": None}]
        path.write_text(json.dumps(content if ending == ".json" else {"data": content}), encoding="utf-8")
    elif ending == ".csv":
        quoted = "".join(f'{i},"{text.replace(chr(34), chr(34) * 2)}"\r\n' for i, text in enumerate(texts))
        path.write_text("\ufeffid,text\r\n" + quoted + "9\r\n", encoding="utf-8", newline="")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows, {"id": 9, "text": None}]), path)
    if compressed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path = path.with_name(path.name + ".gz")
    found = documents(path)
    assert list(found) == [texts[0], texts[1], texts[3]]
    assert (found.counts.read, found.counts.null, found.counts.empty, found.counts.malformed) == (5, 1, 1, 0)
    assert found.counts.layout == "text"


def test_c45_columns_found_are_listed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"id": 1, "body": "words"}])
    with pytest.raises(CorpusError, match=r"rows\.jsonl:1 has columns 'id', 'body'.*column=NAME"):
        list(documents(path))
    with pytest.raises(CorpusError, match=r"no column 'text': its columns are 'id', 'body'"):
        list(documents(path, "text"))
    assert list(documents(path, "body")) == ["words"]
    found = documents(path, "id")
    assert not list(found)
    assert found.counts.first_malformed == f"{path}:1: column 'id' holds int, not text"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "ok"}\n\n{"text": \n', r"a\.jsonl:3 is not JSON"),
        ("a.jsonl", '{"text": "ok"}\n7\n', r"a\.jsonl:2 is int, not an object"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1 is not JSON"),
        ("a.json", '[{"text": "ok"},\n{]', r"a\.json:2 is not JSON"),
        ("a.json", '["text"]', r"a\.json row 1 is str"),
        ("a.json", '{"text": "ok"}\n{"text": 1', r"a\.json:2 is not JSON"),
        (
            "a.jsonl",
            '{"text": "ok"}\n{"text": "\\ud83d\\ude00 \\ud800"}',
            r"a\.jsonl:2 holds \\ud800, half of a surrogate pair",
        ),
        ("a.json", '[{"text": "\\uDFFF"}]', r"a\.json holds \\udfff, half"),
        ("a.csv", "text,id\nok,1,2\n", r"a\.csv:2 has more fields than the header's 2"),
        ("a.csv", 'text,id\n"open,1\n', r"a\.csv: the row after line 1 is not CSV"),
        ("a.parquet", "PAR1", r"a\.parquet is not a readable parquet file"),
        ("a.jsonl.gz", "plain", r"a\.jsonl\.gz is not a whole gzip file"),
    ],
)
def test_c45_a_bad_place_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match=message):
        list(documents(tmp_path / name))


def test_wrong_encodings_are_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "naïve".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"not UTF-8: byte 0xef at offset 5"):
        load_text(CorpusSource(str(tmp_path / "a.txt")))
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "na\xefve"}\n')
    with pytest.raises(CorpusError, match=r"byte 0xef at offset 27"):
        list(documents(tmp_path / "a.jsonl"))
    (tmp_path / "b.txt").write_text("text", encoding="utf-16")
    with pytest.raises(CorpusError, match="UTF-16"):
        load_text(CorpusSource(str(tmp_path / "b.txt")))


CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"prompt": "Hi", "response": "Ho"},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Ho"}]},
    {"instruction": "Hi", "input": "", "output": "Ho"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
                  {"role": "assistant", "content": "Ho"}]},
]  # fmt: skip


@pytest.mark.parametrize("row", CHATS)
def test_c45_chat_forms_go_through_the_template(tmp_path: Path, make_tokenizer: TokenizerMaker, row: object) -> None:
    path = write_lines(tmp_path / "chat.jsonl", [row])
    tokenizer = make_tokenizer(template=CHATML)
    found = documents(path, tokenizer=tokenizer)
    assert list(found) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"]
    assert found.counts.templated
    plainly = documents(path)
    assert list(plainly) == ["Hi\n\nHo"]
    assert str(plainly.counts.layout).endswith("(joined plainly, no chat template)")


def test_an_instruction_with_input_asks_both(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    assert list(documents(path)) == ["Add.\n\n1 2\n\n3"]


def test_rows_that_are_no_chat_are_counted(tmp_path: Path, make_tokenizer: TokenizerMaker) -> None:
    rows = [
        CHATS[0],
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "  "}]},
        {"messages": [{"role": "system", "content": "refused"}]},
        {"other": 1},
    ]
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    path = write_lines(tmp_path / "chat.jsonl", rows)
    found = documents(path, tokenizer=make_tokenizer(template=template))
    assert len(list(found)) == 1
    assert (found.counts.read, found.counts.null, found.counts.empty, found.counts.malformed) == (7, 2, 1, 3)
    assert str(found.counts.first_malformed).startswith(f"{path}:3: a chat is a list of messages")


def test_the_whole_text_of_a_file_is_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\n two\n")
    result = load_text(CorpusSource(str(tmp_path / "a.txt")))
    assert (result.text, result.rows) == ("one\r\n\r\n two\n", 1)
    assert result.sha256 == hashlib.sha256(b"one\r\n\r\n two\n").hexdigest()


def test_the_whole_text_of_rows_keeps_blank_ones(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}, {"text": None}, {"text": "two"}])
    result = load_text(CorpusSource(str(path)))
    assert (result.text, result.rows) == ("one\n\n\n\ntwo", 3)
    assert load_text(CorpusSource(str(path)), max_characters=3).text == "one"
    with pytest.raises(CorpusError, match="holds no text"):
        load_text(CorpusSource(str(write_lines(tmp_path / "b.jsonl", [{"text": ""}]))))


def test_a_folder_is_its_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    assert load_text(CorpusSource(str(tmp_path))).text == "first\n\nsecond"


def test_the_shuffle_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(str(i), {"text": str(i)}) for i in range(50)]
    whole = [row.place for row in shuffled(rows, 3)]
    assert whole == [row.place for row in shuffled(rows, 3)]
    assert whole != [row.place for row in shuffled(rows, 4)]
    monkeypatch.setattr("cann_llm_quant.corpus.documents.BUFFER_ROWS", 8)
    through_a_buffer = [row.place for row in shuffled(rows, 3)]
    assert sorted(whole) == sorted(through_a_buffer) == sorted(row.place for row in rows)


def test_c57_chinese_rows_and_paths_under_a_c_locale(tmp_path: Path) -> None:
    folder = tmp_path / "模型 é"
    folder.mkdir()
    content = json.dumps({"text": "量化模型"}, ensure_ascii=False)
    (folder / "行.jsonl").write_text("\ufeff" + content + "\n", encoding="utf-8")
    code = (
        "import pathlib, sys; from cann_llm_quant.corpus import CorpusSource, load_text;"
        "folder = next(pathlib.Path(sys.argv[1]).iterdir());"
        "sys.stdout.buffer.write(load_text(CorpusSource(str(next(folder.iterdir())))).text.encode('utf-8'))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, check=True)
    assert done.stdout.decode("utf-8") == "量化模型"
