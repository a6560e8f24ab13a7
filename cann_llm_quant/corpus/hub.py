"""Datasets of the hub, streamed: rows arrive as they are asked for, and no more than a shuffle buffer ahead.

Without the hub (HF_HUB_OFFLINE=1, no network) the processed cache of `datasets` and then the file cache of
`huggingface_hub` are tried. No dataset's own code is ever run.
"""

from collections.abc import Iterator
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from cann_llm_quant.corpus.readers import Row
from cann_llm_quant.corpus.sources import CorpusSource
from cann_llm_quant.errors import CorpusError


def hub_rows(source: CorpusSource, split: str, *, seed: int | None, buffer: int) -> Iterator[Row]:
    """Rows of a hub dataset, in its order or (with a seed) shuffled through `buffer` rows; CorpusError on failure."""
    stream = _open(source, split)
    if seed is not None:
        stream = stream.shuffle(seed=seed, buffer_size=buffer)
    rows = iter(stream)
    number = 0
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
            raise CorpusError(_message(source, split, error)) from error
        number += 1
        yield Row(f"{source.spec} [{split}] row {number}", values)


def _open(source: CorpusSource, split: str) -> Any:
    arguments = {"name": source.subset, "split": split, "streaming": True}
    try:
        return datasets.load_dataset(source.spec, revision=source.revision, **arguments)
    except OSError as error:  # not reached, or not there: the file cache may still hold it
        folder = _cached_snapshot(source)
        if folder is None:
            raise CorpusError(_message(source, split, error)) from error
    except (ValueError, RuntimeError, HfHubHTTPError) as error:
        raise CorpusError(_message(source, split, error)) from error
    try:
        return datasets.load_dataset(folder, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        raise CorpusError(f"{_message(source, split, error)} (read from the cache {folder})") from error


def _cached_snapshot(source: CorpusSource) -> str | None:
    try:
        folder: str = huggingface_hub.snapshot_download(
            source.spec, repo_type="dataset", revision=source.revision, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return folder


def _message(source: CorpusSource, split: str, error: Exception) -> str:
    subset = f", subset '{source.subset}'" if source.subset else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    caches = f"{datasets.config.HF_DATASETS_CACHE} and {huggingface_hub.constants.HF_HUB_CACHE}"
    return (
        f"dataset {source.spec} (split '{split}'{subset}) cannot be read: {lines[0]}; caches looked in: {caches}; "
        "without the hub, give a local .txt, .jsonl, .csv or .parquet file instead"
    )
