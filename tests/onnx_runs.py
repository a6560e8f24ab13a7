"""A tiny model exported to ONNX, and what runs it: ONNX Runtime with its cache handed from step to step."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_folders import save_native
from tiny_models import VOCAB, save_tiny

from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.onnx_dialect import Dialect
from cann_llm_quant.export.onnx_export import WrittenOnnx, export_onnx
from cann_llm_quant.export.packed_model import packed_model
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderModel, DenseLinear
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

CPU = torch.device("cpu")


def save_quantized(
    folder: Path,
    family: str,
    scheme: Scheme,
    *,
    inputs: ActivationScheme | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A random model of `family`, every linear in `scheme`; returns the native folder."""
    return save_native(save_tiny(folder / "source", family, dtype=dtype, **config), folder / "packed", scheme, inputs)


def export(packed: Path, out: Path, dialect: str | Dialect = "ort", dtype: str | None = None) -> WrittenOnnx:
    """The native folder as ONNX."""
    with open_native(packed) as checkpoint:
        return export_onnx(checkpoint, packed_model(checkpoint), out, dialect=dialect, dtype=dtype)


def decoder_of(packed: Path) -> DecoderModel:
    """Our decoder over the folder's weights, dequantized to float32, its inputs quantized where the folder says so."""
    with open_native(packed) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        outer = load_outer(checkpoint, arch, CPU, torch.float32)
        quantizers = {module: checkpoint.inputs(module) for module in checkpoint.modules}
        used = {module: inputs for module, inputs in quantizers.items() if inputs is not None}
        layers = [
            build_layer(arch, index, load_layer(checkpoint, arch, index, CPU, torch.float32), used)
            for index in range(arch.num_layers)
        ]
        return DecoderModel(arch, layers, outer.embedding, outer.norm, DenseLinear(outer.head))


def reference(packed: Path, ids: torch.Tensor, mask: torch.Tensor | None = None) -> np.ndarray:
    """Our logits [batch, seq, vocab] without a cache; padding is where `mask` is 0."""
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    attend = None if mask is None else CausalAttend(mask.bool())
    with torch.inference_mode():
        return decoder_of(packed)(ids, positions, attend).numpy()


class OrtRun:
    """A session on the CPU that keeps the cache between calls."""

    def __init__(self, folder: Path, batch: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self._past = {
            value.name: np.zeros((batch, value.shape[1], 0, value.shape[3]), kinds[value.type])
            for value in self.session.get_inputs()
            if value.name.startswith("past")
        }

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> np.ndarray:
        """Logits of the next tokens; `mask` [batch, all tokens so far] has 0 at padding."""
        past = next(iter(self._past.values())).shape[2]
        if mask is None:
            mask = torch.ones(len(ids), past + ids.shape[1], dtype=torch.int64)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
        logits, *present = self.session.run(None, feed | self._past)
        self._past = dict(zip(self._past, present, strict=True))
        return np.asarray(logits, dtype=np.float32)


def random_ids(batch: int, seq: int, seed: int = 3, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
