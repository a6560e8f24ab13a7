import io
import json
import time
from datetime import date
from pathlib import Path

import pytest
from tiny_tokenizers import CHATML, SAMPLE, TokenizerMaker, write_tokenizer
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cann_llm_quant.errors import CheckpointError, CorpusError, InputError
from cann_llm_quant.tokenizer import adds_bos, bos_id, chat_text, check_vocabulary, encode, load_tokenizer

HELLO = [{"role": "user", "content": "Hi"}]
TEXT = "The weights 2024 are rounded, naïve 模型 or not."


def test_tokenizer_json_decides_for_qwen2_where_auto_tokenizer_rewrites_it(tmp_path: Path) -> None:
    """The trap: AutoTokenizer replaces the pre-tokenizer for model_type qwen2."""
    write_tokenizer(tmp_path)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.pre_tokenizer = Sequence([Digits(individual_digits=False), raw.pre_tokenizer])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    expected = raw.encode(TEXT, add_special_tokens=False).ids

    assert encode(load_tokenizer(tmp_path), TEXT, bos=False) == expected
    auto = AutoTokenizer.from_pretrained(str(tmp_path))
    before = json.loads(raw.to_str())["pre_tokenizer"]
    assert json.loads(auto.backend_tokenizer.to_str())["pre_tokenizer"] != before, "the trap is gone: simplify"


def test_truncation_and_padding_stored_in_the_file_do_not_apply(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = raw.encode(TEXT * 9, add_special_tokens=False).ids
    raw.enable_truncation(8)
    raw.enable_padding(length=4096, pad_id=1, pad_token="</s>")
    raw.save(str(tmp_path / "tokenizer.json"))
    assert encode(load_tokenizer(tmp_path), TEXT * 9, bos=False) == expected


def test_c73_bos_comes_once(plain: PreTrainedTokenizerBase, prefixed: PreTrainedTokenizerBase) -> None:
    assert (adds_bos(plain), adds_bos(prefixed)) == (False, True)
    for tokenizer in (plain, prefixed):
        bare = encode(tokenizer, TEXT, bos=False)
        assert encode(tokenizer, TEXT, bos=True) == [0, *bare]
        assert encode(tokenizer, "<s>" + TEXT, bos=True) == [0, *bare]
        assert encode(tokenizer, "", bos=True) == [0]
    assert encode(prefixed, TEXT, bos=True) == prefixed(TEXT)["input_ids"]


def test_c73_bos_asked_of_a_tokenizer_without_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert not adds_bos(tokenizer)
    with pytest.raises(InputError, match="no BOS token"):
        bos_id(tokenizer)
    with pytest.raises(InputError, match="no BOS token"):
        encode(tokenizer, TEXT, bos=True)


def test_special_tokens_names_in_text_become_the_tokens(plain: PreTrainedTokenizerBase) -> None:
    assert encode(plain, "<|im_end|>", bos=False) == [3]


def test_a_text_longer_than_the_model_takes_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 4}), encoding="utf-8")
    assert len(encode(load_tokenizer(tmp_path), TEXT, bos=False)) > 4
    assert not caplog.records


def test_c38_rows_beyond_the_tokenizer_are_fine_and_missing_rows_are_not(plain: PreTrainedTokenizerBase) -> None:
    size = len(plain)
    check_vocabulary(plain, size)
    check_vocabulary(plain, size + 29)
    with pytest.raises(CheckpointError, match=f"{size} tokens but the embedding only {size - 1} rows"):
        check_vocabulary(plain, size - 1)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "Unheard"}}', "", "\ud800"])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_c72_a_tokenizer_that_needs_its_own_code_is_not_run(tmp_path: Path) -> None:
    """Without tokenizer.json the folder's Python file is the only way in, and it stays shut."""
    (tmp_path / "vocab.txt").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be read without own\.Own, code .* never run"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_chat_reads_as_its_template_says(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(template=CHATML)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert chat_text(tokenizer, messages) == expected
    assert chat_text(tokenizer, messages, generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_a_template_sees_the_date_it_is_given(make_tokenizer: TokenizerMaker) -> None:
    """Templates print today's date: the calibration of tomorrow must equal today's."""
    tokenizer = make_tokenizer(template="\n  {{ strftime_now('%d %b %Y') }}|{{ strftime_now is defined }}")
    assert chat_text(tokenizer, HELLO, today=date(2024, 7, 26)) == "\n  26 Jul 2024|True"
    assert chat_text(tokenizer, HELLO) == f"\n  {date.today():%d %b %Y}|True"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in %}",
    ],
)
def test_c61_a_hostile_or_broken_template_is_the_models_fault(make_tokenizer: TokenizerMaker, template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template is refused"):
        chat_text(make_tokenizer(template=template), HELLO)


def test_c61_loops_within_loops_end_at_the_deadline(make_tokenizer: TokenizerMaker) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = make_tokenizer(template="{% if messages[1] %}" + loops + "{% endif %}done")
    with pytest.raises(CheckpointError, match=r"did not end within 0\.2 s"):
        chat_text(tokenizer, HELLO * 2, seconds=0.2)
    assert chat_text(tokenizer, HELLO, seconds=5.0) == "done"
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.1, "the stopped template still runs"


def test_c61_a_template_that_writes_without_end(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(template="{% for i in range(2000) %}{{ 'x' * 10000 }}{% endfor %}")
    with pytest.raises(CheckpointError, match="wrote 20000000 characters"):
        chat_text(tokenizer, HELLO)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ 1 + messages[0].content }}", "{{ messages[7].content.x }}"],
)
def test_messages_that_a_template_refuses_are_the_texts_fault(make_tokenizer: TokenizerMaker, template: str) -> None:
    with pytest.raises(CorpusError, match="refuses the messages"):
        chat_text(make_tokenizer(template=template), HELLO)


def test_a_chat_without_a_template(plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        chat_text(plain, HELLO)


def test_a_folder_with_only_a_sentencepiece_model(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the extra [sentencepiece] is not installed")
    pytest.importorskip("google.protobuf", reason="the extra [sentencepiece] is not installed")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE * 20), model_writer=model, vocab_size=120, model_type="bpe", minloglevel=3
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', encoding="utf-8")
    expected = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode("The weights of a fox")
    assert encode(load_tokenizer(tmp_path), "The weights of a fox", bos=False) == expected
