"""Whether an output computes the same model as its source, apart from the matrices: sizes, rotary embedding, norms,
biases and tokenizer.

Quantization folds factors into norms and biases, so that only some must be equal. With g the gain of a norm, b a bias:

    final norm       g_out = g                              nothing is folded into it
    norms of mixtures g_out = g                             routers read them, and are not folded into
    q and k          g_out(q) * g_out(k) = g(q) * g(k)      what evening out K takes from the one, the other gets
    bias             b_out ~ rows * b                       rows: the factors of its linear's rows, verify_folds.py
    other biases     b_out = b                              of routers, say
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.verify_findings import Findings, listed
from cann_llm_quant.export.verify_tokens import ids
from cann_llm_quant.models.arch import Arch, Layer
from cann_llm_quant.shown import shown

_SAME = 1e-5  # relative; GGUF holds float32
_CAST = 2.0**-7  # of a number that was stored in bfloat16
_FOLDED = 0.5  # relative, of what rounding leaves uncertain
_AGAIN = "it must be equal; write the model again"
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "norm_offset", "rms_norm_eps", "activation", "num_layers")
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "additional_chat")
_SPECIAL = ("bos_token_id", "eos_token_id")


def compare_architectures(ours: Arch, source: Arch, findings: Findings, *, whole: bool) -> None:
    """What the decoder computes with the weights.

    `whole` where neither is a GGUF file, which states rotary scaling and experts in other ways.
    """
    pairs = [(name, getattr(ours, name), getattr(source, name)) for name in _SIZES]
    if not whole:
        pairs.append(("rope theta", ours.rope.theta, source.rope.theta))
    else:
        pairs += [
            (f"rope {f.name}", getattr(ours.rope, f.name), getattr(source.rope, f.name)) for f in fields(ours.rope)
        ]
        for mine, theirs in zip(ours.layers, source.layers, strict=False):
            pairs += [("experts", mine.moe, theirs.moe), ("the attention's window", mine.window, theirs.window)]
    for name, mine, theirs in pairs:
        if not _same(mine, theirs):
            findings.add("config", f"{name} is {mine}, the source's {theirs}", "the model computes something else")


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (mine, theirs))
    return bool(math.isclose(mine, theirs, rel_tol=_SAME)) if numbers else bool(mine == theirs)


def compare_tokenizers(ours: Checkpoint, source: Checkpoint, findings: Findings) -> None:
    """The tokenizer's files and chat templates byte for byte, where both have files of their own."""
    mine, theirs = (
        {name: data for name, data in one.companion_files().items() if name.startswith(_TOKENIZER)}
        for one in (ours, source)
    )
    missing = [name for name in theirs if name not in mine]
    changed = [name for name in theirs if name in mine and mine[name] != theirs[name]]
    for names, state in ((missing, "lacks the source's"), (changed, "differs from the source's in")):
        if names:
            findings.add("tokenizer", f"{state} {listed(names)}", "copy them, or text becomes other tokens")


def compare_configs(ours: Mapping[str, Any], source: Mapping[str, Any], findings: Findings) -> None:
    """What `config.json` says beside the decoder's map: where texts begin and end, and the class that is loaded."""
    for name in _SPECIAL:
        mine, theirs = ids(ours, name), ids(source, name)
        if mine != theirs and theirs:
            findings.add(
                "config",
                f"{name} is {shown(ours.get(name))}, the source's {shown(source.get(name))}",
                "texts begin or end elsewhere; write the model again",
            )
    name = "architectures"
    mine, theirs = ids(ours, name), ids(source, name)
    if ours.get("model_type") == source.get("model_type") and mine and theirs and mine != theirs:
        findings.add("config", f"{name} is {shown(mine)}, the source's {shown(theirs)}", "runtimes load another class")


def compare_vectors(
    ours: Checkpoint, source: Checkpoint, arch: Arch, rows: Mapping[str, Tensor], findings: Findings
) -> None:
    """The vectors that are not free to change; `rows` are the factors of linears' rows, by module."""
    _must_equal(arch.final_norm_name, ours, source, findings)
    for layer in arch.layers:
        folded = {site.producer.role for site in layer.sites if site.producer is not None}
        for parameter in layer.parameters:
            if parameter.role in ("input_norm", "post_norm") and parameter.role not in folded:
                _must_equal(parameter.name, ours, source, findings)
        _compare_qk_norms(layer, ours, source, findings)
        modules = {spec.module for spec in layer.linears}
        for name in (f"{module}.bias" for module in sorted(modules)):
            _compare_bias(name, ours, source, rows.get(name.removesuffix(".bias")), findings)


def _vector(name: str, checkpoint: Checkpoint) -> Tensor | None:
    return checkpoint.load(name).to(torch.float32) if name in checkpoint.tensors else None


def _must_equal(name: str, ours: Checkpoint, source: Checkpoint, findings: Findings) -> None:
    mine, theirs = _vector(name, ours), _vector(name, source)
    if mine is None or theirs is None:
        return
    if mine.shape != theirs.shape or not bool(((mine - theirs).abs() <= _CAST * theirs.abs()).all()):
        findings.add(name, "is not the source's tensor", _AGAIN)


def _compare_qk_norms(layer: Layer, ours: Checkpoint, source: Checkpoint, findings: Findings) -> None:
    names = [parameter.name for parameter in layer.parameters if parameter.role in ("q_norm", "k_norm")]
    mine, theirs = (_product([_vector(name, one) for name in names]) for one in (ours, source))
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return
    if not bool(((mine - theirs).abs() <= 2 * _CAST * theirs.abs()).all()):
        findings.add(" and ".join(names), "are together not the source's", "write the model again")


def _product(vectors: list[Tensor | None]) -> Tensor | None:
    """That of two vectors of one length; None where there are no such two."""
    known = [vector for vector in vectors if vector is not None]
    return known[0] * known[1] if len(known) == 2 and known[0].shape == known[1].shape else None


def _compare_bias(name: str, ours: Checkpoint, source: Checkpoint, rows: Tensor | None, findings: Findings) -> None:
    mine, theirs = _vector(name, ours), _vector(name, source)
    if theirs is None:
        return
    if mine is None:
        if bool(theirs.any()):
            findings.add(name, "is missing, but the source has it", "write the model again")
    elif mine.shape != theirs.shape or not _near(mine, theirs if rows is None else theirs * rows):
        findings.add(name, "is not the source's bias, folded factors considered", "write the model again")


def _near(mine: Tensor, expected: Tensor) -> bool:
    """Whether numbers are equal within what is not known of the factors; small ones count by the largest's share."""
    slack = expected.abs() + 0.05 * expected.square().mean().sqrt()
    return bool(((mine - expected).abs() <= _FOLDED * slack).all())
