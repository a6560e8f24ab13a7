"""The one place that knows devices: names to torch devices and dtypes, and what this machine has.

`npu` is Ascend through torch_npu, imported only when it is asked for.
"""

import importlib

import torch

from cann_llm_quant.errors import UnsupportedError, UsageError

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str = "cpu") -> torch.device:
    """A usable torch device for `cpu`, `cuda[:N]` or `npu[:N]`.

    Raises UsageError for another name, UnsupportedError when this machine lacks the device.
    """
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "npu"):
        raise UsageError(f"unknown device {name!r}; choose cpu, cuda or npu, with an optional index such as cuda:1")
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise UnsupportedError("device npu needs torch_npu, which is not installed; use --device cpu") from error
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is malformed; write {kind} or {kind}:0") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is available on this machine; use --device cpu")
    count = 1 if kind == "cpu" else getattr(torch, kind).device_count()
    if device.index is not None and device.index >= count:
        raise UnsupportedError(f"device {name!r} does not exist; this machine has {count} {kind} device(s)")
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype for `fp32`, `bf16`, `fp16` or its long name.

    Raises UsageError for another name.
    """
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; choose fp32, bf16 or fp16")
    return DTYPES[name]
