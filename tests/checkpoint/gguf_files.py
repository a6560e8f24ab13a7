"""Tiny GGUF files that the gguf package writes from Hugging Face state dicts, laid out as llama.cpp does it."""

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 256, 512, 4, 2, 64, 32, 3
Kind = gguf.GGMLQuantizationType
TOKENS = [f"t{i}" for i in range(VOCAB)]


def state_dict(layers: int = 2, *, bias: bool = False, norms: bool = False, head: bool = False) -> dict[str, Tensor]:
    """A dense decoder's float32 tensors under Hugging Face names."""
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(layers):
        p = f"model.layers.{n}."
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        shapes |= {f"{p}self_attn.{name}.weight": (size, HIDDEN) for name, size in rows.items()}
        shapes |= {f"{p}self_attn.{name}.bias": (size,) for name, size in rows.items() if bias}
        shapes |= {f"{p}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk" if norms}
        shapes[f"{p}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {f"{p}mlp.gate_proj.weight": (FFN, HIDDEN), f"{p}mlp.up_proj.weight": (FFN, HIDDEN)}
        shapes |= {f"{p}mlp.down_proj.weight": (HIDDEN, FFN)}
        shapes |= {f"{p}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor, from the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    qwen = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2MOE, 8)
    qwen3 = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 8)
    suffixes = (".weight", ".bias")
    return next(found for m in (table, qwen, qwen3) if (found := m.get_name(name, try_suffixes=suffixes)) is not None)


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """The row order in which llama.cpp stores q and k of architecture llama: `(2, half) -> (half, 2)` in each head."""
    out = np.empty_like(w)
    size = w.shape[0] // heads
    for head in range(heads):
        for half in range(2):
            for i in range(size // 2):
                out[head * size + 2 * i + half] = w[head * size + half * (size // 2) + i]
    return out


def write_gguf(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, object] | None = None,
) -> Path:
    """Write `tensors` (GGUF names); matrices in `kind`, vectors in float32."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1 + max((int(n.split(".")[1]) for n in tensors if n.startswith("blk.")), default=0))
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in (metadata or {}).items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        stored = kind if value.ndim > 1 and value.shape[-1] % 256 == 0 else Kind.F32
        data = value.astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_layout(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """GGUF names and row order of architecture llama."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    return {
        gguf_name(name): interleave(w.numpy(), heads[role]) if (role := name.split(".")[-2]) in heads else w.numpy()
        for name, w in state.items()
    }


def plain_layout(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """GGUF names, rows as they are."""
    return {gguf_name(name): w.numpy() for name, w in state.items()}
