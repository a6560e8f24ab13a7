"""From a checkpoint's config and tensor shapes to its architecture map, refusing what does not fit together."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.models.arch import Arch, Layer
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.models.decoder import ACTIVATIONS
from cann_llm_quant.models.families import known_families
from cann_llm_quant.models.layer_map import Family, LayerBuilder, Shapes, check_tensors, layer_count, shared_sizes
from cann_llm_quant.models.rope_config import rope_from_config, scaled_positions
from cann_llm_quant.shown import shown

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def arch_from_checkpoint(checkpoint: Checkpoint) -> Arch:
    """The architecture map of a float checkpoint; no tensor is read, except both ends of a head said to be tied.

    Raises UnsupportedError for an unknown `model_type` or activation, CheckpointError where config and tensors
    contradict each other, tensors are missing, or a tensor that the decoder reads is not stored as a float.
    """
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    arch = arch_from_config(checkpoint.config, shapes, str(checkpoint.path))
    for name in arch.tensor_shapes():
        dtype = checkpoint.tensors[name].dtype
        if dtype not in FLOATS:
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is stored as {kind}; give the float model")
    _check_redundant_head(checkpoint, arch)
    return arch


def arch_from_config(config: Mapping[str, Any], shapes: Shapes, where: str) -> Arch:
    """The architecture map of a parsed `config.json` and the shapes of the stored tensors by name.

    `where` names the model in messages. Raises as `arch_from_checkpoint` does.
    """
    fields = ConfigFields(config, f"{where}/config.json")
    family = _family(fields)
    vocab, hidden = _embedding_sizes(family, fields, shapes)
    sizes = shared_sizes(family, fields, shapes, hidden)
    layers = tuple(
        LayerBuilder(family, fields, shapes, sizes, index).build()
        for index in range(layer_count(family, fields, shapes))
    )
    positions = fields.optional_integer("max_position_embeddings")
    rope = rope_from_config(
        fields,
        family.default_theta,
        positions or fields.integer("max_sequence_length", default=2048),
        partial_rotary=family.partial_rotary,
    )
    rope = replace(rope, interleaved=family.interleaved_rotary)
    arch = Arch(
        model_type=family.model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=_intermediate(fields, layers),
        max_positions=scaled_positions(rope),
        rms_norm_eps=fields.number("rms_norm_eps", family.default_eps),
        rope=rope,
        layers=layers,
        embedding_name=family.embedding,
        final_norm_name=family.final_norm,
        head_module=family.head,
        tied_head=_tied(family, fields, shapes),
        activation=_activation(fields),
    )
    check_tensors(arch.tensor_shapes(), shapes, where)
    return arch


def unclaimed(arch: Arch, names: Iterable[str]) -> list[str]:
    """The tensors that the architecture has no place for, in the given order.

    Old rotary buffers, multi-token-prediction heads, a stored copy of a tied head: no error, but whoever writes a new
    checkpoint has to account for them.
    """
    claimed = arch.tensor_shapes()
    return [name for name in names if name not in claimed]


def _family(fields: ConfigFields) -> Family:
    families = known_families()
    model_type = fields.text("model_type")
    if model_type not in families:
        raise UnsupportedError(
            f"{fields.where}: model_type {shown(model_type)} is not supported; known are {', '.join(families)}"
        )
    return families[model_type]


def _activation(fields: ConfigFields) -> str:
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{fields.where}: hidden_act {shown(activation)} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return activation


def _embedding_sizes(family: Family, fields: ConfigFields, shapes: Shapes) -> tuple[int, int]:
    """Rows and columns of the embedding: the vocabulary, padded as stored, and the hidden size."""
    shape = shapes.get(family.embedding)
    if shape is None or len(shape) != 2:
        found = "is missing" if shape is None else f"has shape {list(shape)} instead of [vocabulary, hidden]"
        raise CheckpointError(f"{fields.where}: the embedding {family.embedding} {found}")
    vocab = fields.size("vocab_size", found=shape[0], source=family.embedding)
    return vocab, fields.size("hidden_size", found=shape[1], source=family.embedding)


def _intermediate(fields: ConfigFields, layers: tuple[Layer, ...]) -> int:
    """Width of the dense MLPs; for a model of experts only, what the config says or an expert's width."""
    for layer in layers:
        if layer.moe is None:
            return layer.linear("gate").out_features
    return fields.optional_integer("intermediate_size") or layers[0].linear("experts.0.gate").out_features


def _tied(family: Family, fields: ConfigFields, shapes: Shapes) -> bool:
    """What the config says; where it is silent, a file without a head has a tied one."""
    said = fields.optional_flag("tie_word_embeddings")
    return said if said is not None else f"{family.head}.weight" not in shapes


def _check_redundant_head(checkpoint: Checkpoint, arch: Arch) -> None:
    """A stored head of a tied model must equal the embedding: readers disagree on which of two matrices is meant."""
    head = f"{arch.head_module}.weight"
    if not arch.tied_head or head not in checkpoint.tensors:
        return
    if not torch.equal(checkpoint.load(arch.embedding_name), checkpoint.load(head)):
        raise CheckpointError(
            f"{checkpoint.path}: config.json says tie_word_embeddings=true, but {head} differs from "
            f"{arch.embedding_name}; set it to false to use both, or remove the head"
        )
