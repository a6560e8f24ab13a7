"""What a run is given besides the recipe, what it says while it works, and what it returns."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.pipeline.expert_counts import ExpertCounts
from cann_llm_quant.pipeline.kv_sensitivity_file import KvChoiceReport

GIB = 1 << 30
BLOCK_ELEMENTS = 1 << 26  # numbers of an embedding or a head that are in float32 at a time

Stage = Literal[
    "prepare", "forward", "backward", "measure", "calibrate", "solve", "propagate", "replay", "write", "done"
]


@dataclass(frozen=True)
class RunOptions:
    """How to run. Only `device`, `dtype` and `max_shard_bytes` can change the output's bytes."""

    device: str = "cpu"
    dtype: str = "fp32"
    activation_budget: int = 2 * GIB
    max_shard_bytes: int = 5_000_000_000
    revision: str | None = None
    allow_pickle: bool = False
    ignore_source_quant: bool = False
    dequantize: bool = False
    allow_empty_pattern: bool = False
    allow_fewer_samples: bool = False
    overwrite: bool = False
    tensor_parallel: int = 1
    sensitivity: Path | None = None
    kv_sensitivity: Path | None = None


@dataclass(frozen=True)
class Event:
    """One step of progress: `done` of `total` passes of one window through one layer; `error` is the mean relative
    output error of the layer just solved; `message` is a sentence for the user (a warning when `warning`).
    """

    stage: Stage
    done: int = 0
    total: int = 0
    layer: str | None = None
    error: float | None = None
    message: str | None = None
    warning: bool = False


@dataclass(frozen=True)
class QuantizeReport:
    """What a run did, for `--json` and for the closing lines."""

    output: Path
    model_type: str
    method: str
    effort: str
    layers: int
    resumed_layers: int
    quantized_linears: int
    quantized_parameters: int
    total_parameters: int
    bits_per_weight: float | None
    source_tensors: int
    kept_tensors: int
    dropped_tensors: dict[str, str]
    extra_tensors: list[str]
    float_modules: dict[str, str]
    formats: dict[str, int]
    weight_files: list[str]
    output_bytes: int
    source_bytes: int
    mean_rtn_error: float | None
    mean_error: float | None
    experts: ExpertCounts | None
    kv_cache: KvCache | None
    calibration: dict[str, Any] | None
    seconds: float
    peak_memory_bytes: int
    warnings: list[str] = field(default_factory=list)
    kv_choice: KvChoiceReport | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        cache = None if self.kv_cache is None else self.kv_cache.model_dump(mode="json")
        choice = None if self.kv_choice is None else self.kv_choice.document()
        return asdict(self) | {"output": str(self.output), "kv_cache": cache, "kv_choice": choice}
