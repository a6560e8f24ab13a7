"""Run by the conformance test in a process of its own: folders in the AscendV1 layout, loaded by vllm-ascend's methods.

    python ascend_loader.py UNPACKED_WHEEL FOLDER OUTPUTS [FOLDER OUTPUTS ...]

For every linear of the model, fused as vLLM fuses them, it writes the input and what `apply` returns to the safetensors
file OUTPUTS; for routed experts the weights as the NPU would get them, for attention the scales. It prints a JSON list
of the methods' names and the errors, by module, for each folder.
"""

import json
import sys
from pathlib import Path

import ascend_stubs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Model:
    """The folder's config, description and tensors."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.dtype = DTYPES[self.config.get("torch_dtype") or self.config["dtype"]]
        self.tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ascend_stubs.CURRENT.model_config.hf_config.model_type = self.config["model_type"]
        from vllm_ascend.quantization.modelslim_config import AscendModelSlimConfig

        self.quant = AscendModelSlimConfig()
        self.quant.maybe_update_config(str(folder))
        self.quant.packed_modules_mapping = dict(FUSED)
        ascend_stubs.CURRENT.quant_config = self.quant


def run_linear(model: Model, prefix: str, results: dict[str, Tensor], methods: dict[str, str]) -> None:
    """Create the parameters of one (fused) linear, load every shard, process, apply."""
    parent, _, leaf = prefix.rpartition(".")
    shards = [f"{parent}.{shard}" for shard in FUSED.get(leaf, [leaf])]
    kind = ascend_stubs.RowParallelLinear if leaf in ("o_proj", "down_proj") else ascend_stubs.LinearBase
    layer = kind(prefix, model.dtype)
    method = model.quant.get_quant_method(layer, prefix)
    methods[prefix] = type(getattr(method, "quant_method", method)).__name__
    if not hasattr(method, "quant_method"):
        return
    sizes = [_rows(model, shard) for shard in shards]
    columns = model.tensors[f"{shards[0]}.weight"].shape[1]
    method.create_weights(layer, columns, sizes, columns, sum(sizes), model.dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            _load(parameter, [model.tensors[f"{shard}.{name}"] for shard in shards], type(parameter).__name__)
    method.process_weights_after_loading(layer)
    biases = [model.tensors.get(f"{shard}.bias") for shard in shards]
    bias = torch.cat(biases).to(model.dtype) if all(bias is not None for bias in biases) else None
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).to(model.dtype)
    results[f"{prefix}:x"], results[f"{prefix}:y"] = x, method.apply(layer, x, bias)


def _rows(model: Model, shard: str) -> int:
    for name in ("weight_scale", "deq_scale"):
        if f"{shard}.{name}" in model.tensors:
            return model.tensors[f"{shard}.{name}"].shape[0]
    raise KeyError(shard)


def _load(parameter: Tensor, shards: list[Tensor], kind: str) -> None:
    """As vLLM does: shards one below the other; of numbers for a whole tensor the last one stays."""
    stored = shards[-1] if kind == "PerTensorScaleParameter" else torch.cat(shards)
    assert parameter.shape == stored.shape, (parameter.shape, stored.shape)
    parameter.copy_(stored)


def run_experts(model: Model, prefix: str, results: dict[str, Tensor], methods: dict[str, str]) -> None:
    """The fused experts of one layer after processing."""
    layer = ascend_stubs.FusedMoE()
    method = model.quant.get_quant_method(layer, prefix)
    methods[prefix] = type(method.quant_method).__name__
    count = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in model.tensors)
    method.create_weights(layer, count, model.config["hidden_size"], model.config["moe_intermediate_size"], model.dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            part, _, suffix = name.partition("_")
            leaves = ("gate_proj", "up_proj") if part == "w13" else ("down_proj",)
            for expert in range(count):
                stored = torch.cat([model.tensors[f"{prefix}.{expert}.{leaf}.{suffix}"] for leaf in leaves])
                assert parameter[expert].shape == stored.shape, (name, parameter[expert].shape, stored.shape)
                parameter[expert].copy_(stored)
    method.process_weights_after_loading(layer)
    results |= {f"{prefix}:{name}": parameter.detach() for name, parameter in layer.named_parameters()}


def run_attention(model: Model, prefix: str, results: dict[str, Tensor], methods: dict[str, str]) -> None:
    """The scales of the int8 cache, loaded under the names that the package maps theirs to."""
    layer = ascend_stubs.Attention()
    method = model.quant.get_quant_method(layer, f"{prefix}.attn")
    if method is None:
        return
    methods[f"{prefix}.attn"] = type(method.quant_method).__name__
    method.create_weights(layer)
    for name, tensor in model.tensors.items():
        target = model.quant.get_cache_scale(name) if name.startswith(f"{prefix}.") else None
        if target is not None:
            parameter = getattr(layer, target.rpartition(".")[2])
            parameter.weight_loader(parameter, tensor)
    method.process_weights_after_loading(layer)
    results |= {f"{prefix}.attn:{name}": parameter.detach() for name, parameter in layer.named_parameters()}


def run_folder(folder: str, outputs: str) -> dict[str, dict[str, str]]:
    """Run everything that the folder describes; what fails is an error by module."""
    model = Model(Path(folder))
    results: dict[str, Tensor] = {}
    methods: dict[str, str] = {}
    errors: dict[str, str] = {}
    for number in range(model.config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        mlp = "block_sparse_moe" if model.config["model_type"] == "mixtral" else "mlp"
        jobs = [(run_linear, "self_attn.qkv_proj"), (run_linear, "self_attn.o_proj"), (run_attention, "self_attn")]
        if f"{layer}.{mlp}.gate.weight" in model.tensors:
            jobs.append((run_experts, f"{mlp}.experts"))
        else:
            jobs += [(run_linear, "mlp.gate_up_proj"), (run_linear, "mlp.down_proj")]
        for job, name in jobs:
            try:
                job(model, f"{layer}.{name}", results, methods)
            except (KeyError, ValueError, NotImplementedError, ZeroDivisionError) as error:
                errors[f"{layer}.{name}"] = f"{type(error).__name__}: {error}"
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, outputs)
    return {"methods": methods, "errors": errors}


def main(wheel: str, *pairs: str) -> None:
    ascend_stubs.install(Path(wheel))
    print(json.dumps([run_folder(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
