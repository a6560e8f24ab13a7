"""A folder in the AscendV1 layout without the converter: plain rounding, our encoder, one weight file."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from native_folders import round_weight
from safetensors.torch import load_file, save_file
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.ascend import AscendEncoder
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.activations import InputQuantizer, InputRange
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

INT8 = Scheme("int8", True, "channel", None)
INT4 = Scheme("int4", True, "channel", None)
TOKEN = ActivationScheme("int8")
STATIC = ActivationScheme("int8", True, False, "tensor")
STATIC_ASYM = ActivationScheme("int8", False, False, "tensor")
Choice = tuple[Scheme, ActivationScheme | None]


def group(size: int) -> Scheme:
    return Scheme("int4", True, "group", size)


def input_of(scheme: ActivationScheme | None) -> InputQuantizer | None:
    if scheme is None or scheme.dynamic:
        return None if scheme is None else InputQuantizer(scheme)
    zero_point = None if scheme.symmetric else torch.tensor([-7], dtype=torch.int8)
    return InputQuantizer(scheme, InputRange(torch.tensor([2.0**-5 * 1.5]), zero_point))


def packed_model(
    source: Path, choose: Callable[[str], Choice | None], kv: KvPlan | None = None
) -> tuple[PackedModel, Arch]:
    """What the encoder would be told of `source` with its linears quantized as `choose` says, by module."""
    with open_checkpoint(str(source)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        config = dict(checkpoint.config)
    specs = {spec.module: spec for layer in arch.layers for spec in layer.linears if spec.quantizable}
    chosen = {module: choice for module in specs if (choice := choose(module)) is not None}
    model = PackedModel(
        arch=arch,
        schemes={module: scheme for module, (scheme, _) in chosen.items()},
        activations={module: inputs for module, (_, inputs) in chosen.items() if inputs is not None},
        shapes={module: (specs[module].out_features, specs[module].in_features) for module in chosen},
        kv=kv or KvPlan.plain(arch.num_layers),
        dtype=getattr(torch, config["dtype"] if "dtype" in config else config["torch_dtype"]),
        config=config,
    )
    return model, arch


def save_ascend(
    source: Path,
    out: Path,
    choose: Callable[[str], Choice | None],
    encoder: AscendEncoder | None = None,
    kv: KvPlan | None = None,
) -> dict[str, QuantizedTensor]:
    """Write the folder; returns what was stored in it, by module."""
    encoder = encoder or AscendEncoder()
    model, _ = packed_model(source, choose, kv)
    for module, scheme in model.schemes.items():
        assert encoder.refusal(module, scheme, model.activations.get(module), model.shapes[module]) is None
    encoder.check(model)
    tensors = load_file(source / "model.safetensors")
    weights = {module: round_weight(tensors[f"{module}.weight"], scheme) for module, scheme in model.schemes.items()}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module not in weights:
            stored |= encoder.plain(name, tensor)
        elif suffix == "weight":
            inputs = input_of(model.activations.get(module))
            stored |= encoder.encode(module, weights[module], inputs, tensors.get(f"{module}.bias"))
    out.mkdir()
    save_file(stored, out / "quant_model_weights.safetensors", metadata={"format": "pt"})
    for name, content in encoder.files(model, {name: tensor.dtype for name, tensor in stored.items()}).items():
        (out / name).write_bytes(content)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)
    return weights


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    """Change a JSON file in place."""
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the stored tensors of a folder in place."""
    path = folder / "quant_model_weights.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def by_suffix(choices: Mapping[str, Choice | None]) -> Callable[[str], Choice | None]:
    """A choice by the end of a module's name; None for what is not named."""
    return lambda module: next((choice for end, choice in choices.items() if module.endswith(end)), None)
