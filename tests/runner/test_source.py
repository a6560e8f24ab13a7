"""A model by folder, or by hub id out of the cache, whether packed or float."""

from pathlib import Path

import pytest
from native_folders import save_native
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import hub
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.runner.engine import LLMEngine


@pytest.mark.parametrize("packed", [False, True])
def test_a_hub_id_may_be_packed_or_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    plain = save_tiny(tmp_path / "plain")
    folder = save_native(plain, tmp_path / "packed", Scheme("int4", True, "group", 32)) if packed else plain
    asked = []

    def download(repo: str, revision: str | None, allow_pickle: bool) -> Path:
        asked.append((repo, revision, allow_pickle))
        return folder

    monkeypatch.setattr(hub, "_download", download)
    with open_source("org/model", revision="v2") as checkpoint:
        assert isinstance(checkpoint, PackedCheckpoint) is packed
    engine = LLMEngine("org/model", revision="v2", allow_pickle=True)
    expected = LLMEngine(folder).generate([5, 6], 2, ignore_eos=True).token_ids
    assert engine.generate([5, 6], 2, ignore_eos=True).token_ids == expected
    assert asked == [("org/model", "v2", False), ("org/model", "v2", True)]


def test_a_hub_id_is_what_its_files_are_at_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines share weights by the files that a name leads to, never by the name."""
    folders = [save_tiny(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    engines = []
    for folder in folders:
        monkeypatch.setattr(hub, "_download", lambda *_, folder=folder: folder)
        engines.append(LLMEngine("org/model"))
    assert engines[0].model is not engines[1].model
    assert LLMEngine(folders[1]).model is engines[1].model


def test_a_local_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision v2 is for hub ids"):
        open_source(str(save_tiny(tmp_path)), revision="v2")
