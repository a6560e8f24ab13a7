"""What a GGUF file of a model holds: every tensor with its type and where it comes from, and what cannot be written.

The names of layer N's tensors are `blk.N.<role>`; experts lie in one 3-D tensor a role; vectors and routers are F32.
The architecture `llama` (Llama, Mistral, Mixtral) stores q and k with the rows of each head interleaved. What each
architecture computes is fixed in the runtime, so that a model that computes otherwise is refused here.
Names and layout: `checkpoint/gguf_names.py`, the other direction.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from cann_llm_quant.checkpoint.gguf_names import ROPE_FREQUENCIES
from cann_llm_quant.checkpoint.gguf_writer import TensorEntry
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.gguf_blocks import BLOCK, kind_of
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.models.arch import Arch, Layer, LinearSpec
from cann_llm_quant.models.rope import frequencies
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

FloatKind = Callable[[str], Kind]
FLOAT_KINDS = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_NAMES = {
    **{role: f"attn_{role}" for role in "qkv"},
    "o": "attn_output",
    **{role: f"ffn_{role}" for role in ("gate", "up", "down")},
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    **{f"shared.{role}": f"ffn_{role}_shexp" for role in ("gate", "up", "down")},
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_ALWAYS_F32 = ("router", "shared_gate")
# llama.cpp has keys for others, which it does not read for these architectures
_YARN_BETAS = (32.0, 1.0)


@dataclass(frozen=True)
class Planned:
    """One tensor of the file and the tensors of the checkpoint that make it up, one or one for each expert.

    `interleaved_heads`: rows are reordered within so many heads. `value` is a tensor that no checkpoint holds.
    """

    entry: TensorEntry
    sources: tuple[str, ...] = ()
    interleaved_heads: int | None = None
    value: Tensor | None = None


def refusal(module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]) -> str | None:
    """Why GGUF cannot hold this linear's codes, as the end of a sentence about it; None where it can."""
    if shape[1] % BLOCK:
        return f"has {shape[1]} columns, but GGUF's blocks have {BLOCK}"
    if kind_of(scheme) is not None:
        return None
    if scheme.scale_type == "float" and scheme.group_size is not None and scheme.group_size % BLOCK:
        return f"has scales of {scheme.group_size} columns, but GGUF's blocks have {BLOCK}"
    return f"is {scheme.label()}, for which GGUF has no type"


def nearest(scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
    """The scheme that `--requantize` would round a refused linear to; None where its columns fit no block."""
    if shape[1] % BLOCK:
        return None
    bits = scheme.bits if scheme.is_integer or scheme.bits == 8 else 4
    if bits > 5:
        return Scheme("int8", True, "group", BLOCK)
    return Scheme("int5" if bits == 5 else "int4", scheme.symmetric, "group", BLOCK)


def check(model: PackedModel) -> list[str]:
    """Warnings about the whole model, a sentence each. Raises UnsupportedError for what llama.cpp would not compute."""
    _check_computation(model.arch)
    _check_experts(model)
    warnings = []
    if model.activations:
        warnings.append(
            f"the inputs of {len(model.activations)} linears are quantized, which GGUF cannot say: its runtimes choose"
        )
    if model.kv.quantizes:
        warnings.append("the formats of the KV cache are not stored: a GGUF runtime takes them from its own options")
    wider = {s.label(): kind.name for s in model.schemes.values() if (kind := kind_of(s)) and s.bits in (2, 3, 6)}
    warnings += [f"{label} weights are stored as {kind}, exactly but in more bits" for label, kind in wider.items()]
    window = smallest_window(model.arch)
    if window is not None and window < model.arch.max_positions:
        warnings.append(
            f"llama.cpp attends to all tokens where this model has a window: context_length is cut to {window}"
        )
    if model.arch.rope.kind == "dynamic":
        warnings.append("GGUF has no dynamic rotary scaling: the file is for contexts of the trained length")
    return warnings


def smallest_window(arch: Arch) -> int | None:
    """The shortest sliding window of any layer."""
    return min((layer.window for layer in arch.layers if layer.window is not None), default=None)


def plan_tensors(model: PackedModel, float_kind: FloatKind) -> list[Planned]:
    """Every tensor of the file in order; matrices in float have the type that `float_kind` gives for their name."""
    arch = model.arch
    planned = [_outer(model, "token_embd", arch.embedding_name, float_kind)]
    for layer in arch.layers:
        planned += _layer(model, layer, float_kind)
    planned.append(_vector("output_norm.weight", arch.final_norm_name, (arch.hidden_size,)))
    if not arch.tied_head:
        planned.append(_outer(model, "output", f"{arch.head_module}.weight", float_kind))
    elif ARCHITECTURES[arch.model_type] == "qwen2moe":  # its loader knows no tied head
        planned.append(_outer(model, "output", arch.embedding_name, float_kind))
    if arch.rope.kind == "llama3":
        divisors = llama3_divisors(arch)
        planned.append(Planned(TensorEntry(ROPE_FREQUENCIES, Kind.F32, tuple(divisors.shape)), value=divisors))
    return planned


def llama3_divisors(arch: Arch) -> Tensor:
    """What each rotary frequency is divided by, float32 `[head_dim / 2]`."""
    scaled, _ = frequencies(arch.rope, arch.head_dim, 0)
    plain = 1.0 / arch.rope.theta ** (torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim)
    return plain / scaled


def _check_computation(arch: Arch) -> None:
    problem = _contradiction(arch)
    if problem is not None:
        raise UnsupportedError(f"{arch.model_type}: {problem}; llama.cpp would compute another model")


def _contradiction(arch: Arch) -> str | None:
    """What the runtime's architecture of this model type does otherwise."""
    if arch.model_type not in ARCHITECTURES:
        return f"this version writes GGUF for {', '.join(ARCHITECTURES)}"
    target, rope = ARCHITECTURES[arch.model_type], arch.rope
    moes = {layer.moe for layer in arch.layers}
    biased = {spec.role for layer in arch.layers for spec in layer.linears if spec.bias}
    if arch.activation != "silu" or arch.norm_offset:
        return f"its activation {arch.activation} or norm offset {arch.norm_offset:g} is not Llama's"
    if len(moes) > 1:
        return "some of its layers have experts and others have none"
    normalized = {moe.normalize_top_k for moe in moes if moe is not None}
    if normalized and normalized != {target != "qwen2moe"}:
        return f"norm_topk_prob={normalized.pop()} is not what architecture {target} does"
    if target != "llama" and (biased - {"q", "k", "v"}):
        return f"architecture {target} has no bias on {', '.join(sorted(biased - {'q', 'k', 'v'}))}"
    if target in ("qwen2", "qwen2moe") and arch.num_heads * arch.head_dim != arch.hidden_size:
        return f"architecture {target} has heads of hidden_size / heads, not of {arch.head_dim}"
    if rope.kind == "llama3" and target != "llama":
        return f"architecture {target} has no rotary scaling of kind llama3"
    if rope.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "it turns a part of each head only"
    if rope.kind == "yarn" and not _is_plain_yarn(arch):
        return "its yarn attention factor is not the usual one, which GGUF cannot say"
    if rope.kind == "yarn" and _betas(arch) != _YARN_BETAS:
        return f"its yarn ramp is from beta_fast, beta_slow = {_betas(arch)}, and that of its runtime {_YARN_BETAS}"
    return None


def _is_plain_yarn(arch: Arch) -> bool:
    _, factor = frequencies(arch.rope, arch.head_dim, 0)
    usual = 1 + 0.1 * math.log(max(1.0, arch.rope.parameters["factor"]))
    return abs(factor - usual) < 1e-6 and arch.rope.parameters.get("truncate", True) is True


def _betas(arch: Arch) -> tuple[float, float]:
    given = arch.rope.parameters
    return float(given.get("beta_fast", _YARN_BETAS[0])), float(given.get("beta_slow", _YARN_BETAS[1]))


def _check_experts(model: PackedModel) -> None:
    for layer in model.arch.layers:
        for role, specs in expert_roles(layer):
            kinds = {kind_of(model.schemes[spec.module]) if spec.module in model.schemes else None for spec in specs}
            if len(kinds) > 1:
                raise UnsupportedError(
                    f"layer {layer.index}: its experts' {role} are stored in {len(kinds)} types, but GGUF keeps all "
                    "experts in one tensor; quantize all experts alike, or add --requantize"
                )


def expert_roles(layer: Layer) -> Iterator[tuple[str, list[LinearSpec]]]:
    """For gate, up and down: the linears of all experts, in order; nothing for a layer without experts."""
    if layer.moe is not None:
        for role in ("gate", "up", "down"):
            yield role, [layer.linear(f"experts.{index}.{role}") for index in range(layer.moe.num_experts)]


def _layer(model: PackedModel, layer: Layer, float_kind: FloatKind) -> Iterator[Planned]:
    prefix, arch = f"blk.{layer.index}.", model.arch
    interleaves = ARCHITECTURES[arch.model_type] == "llama"
    heads: Mapping[str, int] = {"q": arch.num_heads, "k": arch.num_kv_heads} if interleaves else {}
    for parameter in layer.parameters:
        yield _vector(f"{prefix}{_NAMES[parameter.role]}.weight", parameter.name, parameter.shape)
    for spec in layer.linears:
        if spec.role.startswith("experts."):
            continue
        name, order = f"{prefix}{_NAMES[spec.role]}", heads.get(spec.role)
        kind = Kind.F32 if spec.role in _ALWAYS_F32 else _kind(model, spec.module, float_kind)
        shape = (spec.in_features,) if spec.role == "shared_gate" else (spec.out_features, spec.in_features)
        yield Planned(TensorEntry(f"{name}.weight", kind, shape), (f"{spec.module}.weight",), order)
        if spec.bias:
            yield _vector(f"{name}.bias", f"{spec.module}.bias", (spec.out_features,), order)
    for role, specs in expert_roles(layer):
        kind = _kind(model, specs[0].module, float_kind)
        entry = TensorEntry(
            f"{prefix}ffn_{role}_exps.weight", kind, (len(specs), specs[0].out_features, specs[0].in_features)
        )
        yield Planned(entry, tuple(f"{spec.module}.weight" for spec in specs))


def _kind(model: PackedModel, module: str, float_kind: FloatKind) -> Kind:
    return kind_of(model.schemes[module]) if module in model.schemes else float_kind(f"{module}.weight")


def _outer(model: PackedModel, name: str, source: str, float_kind: FloatKind) -> Planned:
    kind = _kind(model, source.removesuffix(".weight"), float_kind)
    return Planned(TensorEntry(f"{name}.weight", kind, (model.arch.vocab_size, model.arch.hidden_size)), (source,))


def _vector(name: str, source: str, shape: tuple[int, ...], interleaved_heads: int | None = None) -> Planned:
    return Planned(TensorEntry(name, Kind.F32, shape), (source,), interleaved_heads)
