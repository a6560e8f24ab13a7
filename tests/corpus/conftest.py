"""Tokenizers that every test of text uses."""

from pathlib import Path

import pytest
from tiny_tokenizers import TokenizerMaker, write_tokenizer
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.tokenizer import load_tokenizer


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> TokenizerMaker:
    """`make_tokenizer(bos=…, template=…)`: a tokenizer loaded from a folder of its own."""

    def make(*, bos: bool = False, template: str | None = None) -> PreTrainedTokenizerBase:
        return load_tokenizer(write_tokenizer(tmp_path / "model", bos=bos, template=template))

    return make


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """No BOS of its own, no template, no padding token (C48)."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Its own rule puts BOS first."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("prefixed"), bos=True))
