"""Patterns that come with a model: those that match like `re` does, and those that would not end."""

import json
import re
from pathlib import Path

import pytest
from native_folders import save_native
from tiny_models import save_tiny

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.quant.scheme import Scheme

# As llm-compressor, GPTQModel and vLLM's own checkpoints have them.
REAL = [
    r".*\.mlp\.gate$",
    r".*self_attn\.(q|k|v|o)_proj$",
    r"^model\.layers\.(?:[0-9]|1[0-5])\..*(?:gate|up)_proj.*",
    r".*\.experts\.\d+\.(?:w1|w2|w3)$",
    r"(model\.)?lm_head",
    r".*[*+()|{}]x",
    r"\(a+\)*",
    r"(?P<n>a)+b{2,3}",
    r"[])(]+",
    r".*layers.*mlp.*experts.*proj$",
    r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
    r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17)\.mlp\..*",
]


@pytest.mark.parametrize("text", REAL)
def test_real_patterns_are_those_of_re(text: str) -> None:
    assert foreign_pattern(text, "here") == re.compile(text)


@pytest.mark.parametrize("text", ["(.*)*!", "(([a-z_]+)*[.]*)+!", "(a|a)*!", "(a?b?){30}!", "((x(a+)))+!", "(?:a*)+"])
def test_patterns_that_may_not_end_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="may take forever"):
        foreign_pattern(text, "here")


@pytest.mark.parametrize("text", [".*" * 5 + "x", "[a-z.]*" * 9 + "!", "a?" * 22 + "b", "(?:a|a)" * 22 + "b"])
def test_side_by_side_repeats_and_choices_multiply(text: str) -> None:
    with pytest.raises(UnsupportedError, match="write it with fewer"):
        foreign_pattern(text, "here")


@pytest.mark.parametrize("text", ["a{99999999999999999999}", "(" * 4000 + ")" * 4000, "(", "[z-a]"])
def test_what_re_cannot_compile_is_one_short_line(text: str) -> None:
    with pytest.raises(CheckpointError, match="is no regular expression") as caught:
        foreign_pattern(text, "here")
    assert len(str(caught.value)) < 250


def test_a_target_of_a_config_is_refused_before_it_is_matched(tmp_path: Path) -> None:
    folder = save_native(save_tiny(tmp_path / "m"), tmp_path / "out", Scheme("int4", True, "group", 32))
    (folder / "inference_config.json").unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["ignore"] = [r"re:(([a-z_]+)*\.*)+!"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"quantization_config: ignore: .* may take forever"):
        open_packed(folder)
