"""An ONNX graph in the making: nodes, small constants, and weights that go straight to the data file.

Nothing here needs the onnx library; `onnx_file.py` turns a finished graph into `model.onnx`. Numbers of up to 1 KiB lie
in the model itself, where shape inference sees them, everything else in `model.onnx.data`: weights pass through one at
a time and the graph only remembers where they lie.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.quant.number_formats import all_finite

DATA_FILE = "model.onnx.data"
# Pages can be mapped where they begin at a multiple of their size.
ALIGNMENT = 4096
INLINE_BYTES = 1024
BLOCK_ELEMENTS = 1 << 22

# TensorProto.DataType
ELEMENT_TYPES: Mapping[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
    torch.float8_e4m3fn: 17,
}
INT4 = 22

Attribute = int | float | str | Sequence[int]
# A word stands for a size known when the graph runs, None for one that nothing else has.
Dimension = int | str | None


@dataclass(frozen=True)
class Node:
    """One operator; an empty name among the inputs is an optional one that is left out."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    domain: str


@dataclass(frozen=True)
class Value:
    """The type of a named tensor: element type and shape."""

    name: str
    element: int
    shape: tuple[Dimension, ...]


@dataclass(frozen=True)
class Initializer:
    """A constant: its bytes, or where in the data file they lie."""

    value: Value
    inline: bytes | None
    offset: int
    length: int


class DataFile:
    """The file of weights, written from front to back."""

    def __init__(self, file: HashedFile) -> None:
        self._file = file
        self.sha256 = ""

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.nbytes

    def begin(self) -> int:
        """Fill up to the next aligned offset and return it."""
        self.write(torch.zeros(-self.size % ALIGNMENT, dtype=torch.uint8))
        return self.size

    def write(self, tensor: Tensor) -> None:
        """The tensor's bytes, row by row."""
        self._file.write(memoryview(as_bytes(tensor).numpy().data))

    def finish(self) -> None:
        """Flush all to the disk; `sha256` is then that of the file."""
        self.sha256 = self._file.finish()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, row by row, as a uint8 vector."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Graph:
    """Nodes in the order in which they run; every method that adds one returns the name of what it computes.

    `label` begins the names of nodes that are added (see `named`). `opset` is the version of the standard operators.
    """

    def __init__(self, opset: int, data: DataFile) -> None:
        self.opset = opset
        self.nodes: list[Node] = []
        self.initializers: dict[str, Initializer] = {}
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.known: list[Value] = []
        self.domains: set[str] = {""}
        self._data = data
        self._label = ""

    @contextmanager
    def named(self, label: str) -> Iterator[None]:
        """Name the nodes that are added within after `label`."""
        before, self._label = self._label, f"{label}/"
        yield
        self._label = before

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Attribute) -> str:
        """Add an operator with one result."""
        return self.op_many(1, kind, *inputs, domain=domain, **attributes)[0]

    def op_many(self, count: int, kind: str, *inputs: str, domain: str = "", **attributes: Attribute) -> list[str]:
        """Add an operator with `count` results."""
        name = f"{self._label}{kind}_{len(self.nodes)}"
        outputs = [name if index == 0 else f"{name}_{index}" for index in range(count)]
        self.nodes.append(Node(name, kind, inputs, tuple(outputs), attributes, domain))
        self.domains.add(domain)
        return outputs

    def rename(self, result: str, name: str) -> str:
        """Copy a result under another name, which a graph's output must have."""
        self.nodes.append(Node(name, "Identity", (result,), (name,), {}, ""))
        return name

    def describe(self, result: str, dtype: torch.dtype, *shape: Dimension) -> str:
        """Say what a result is where the operator's own library is needed to infer it."""
        self.known.append(Value(result, ELEMENT_TYPES[dtype], shape))
        return result

    def reduce(self, kind: str, x: str) -> str:
        """Reduce the last axis to one element. Version 18 moved the axes from the attributes to the inputs."""
        if self.opset < 18:
            return self.op(kind, x, axes=[-1], keepdims=1)
        return self.op(kind, x, self.integers(-1), keepdims=1)

    def cast(self, x: str, dtype: torch.dtype) -> str:
        """`x` in another type."""
        return self.op("Cast", x, to=ELEMENT_TYPES[dtype])

    def split(self, x: str, *sizes: int) -> list[str]:
        """The last axis cut into pieces of these sizes."""
        return self.op_many(len(sizes), "Split", x, self.integers(*sizes), axis=-1)

    def integers(self, *values: int) -> str:
        """A vector of int64."""
        return self.constant_once("ints_" + "_".join(map(str, values)), torch.tensor(values, dtype=torch.int64))

    def scalar(self, value: float, dtype: torch.dtype) -> str:
        """A number without dimensions."""
        return self.constant_once(f"{str(dtype).removeprefix('torch.')}_{value}", torch.tensor(value, dtype=dtype))

    def constant_once(self, name: str, tensor: Tensor) -> str:
        """Store a tensor unless this name is stored already."""
        return name if name in self.initializers else self.constant(name, tensor)

    def constant(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> str:
        """Store a tensor, floats rounded to `dtype` a block at a time.

        Raises CheckpointError for a number that `dtype` does not hold.
        """
        dtype = dtype or tensor.dtype
        parts = self._rounded(name, tensor, dtype)
        return self._store(
            Value(name, ELEMENT_TYPES[dtype], tuple(tensor.shape)), parts, tensor.numel() * dtype.itemsize
        )

    def constant_int4(self, name: str, packed: Tensor, shape: tuple[int, ...]) -> str:
        """Store signed 4-bit integers of this shape, two to a byte of `packed`."""
        return self._store(Value(name, INT4, shape), iter([packed]), packed.numel())

    def _store(self, value: Value, parts: Iterator[Tensor], length: int) -> str:
        assert value.name not in self.initializers, f"{value.name} is stored twice"
        if length <= INLINE_BYTES:
            inline = b"".join(as_bytes(part).numpy().tobytes() for part in parts)
            self.initializers[value.name] = Initializer(value, inline, 0, length)
            return value.name
        offset = self._data.begin()
        for part in parts:
            self._data.write(part)
        self.initializers[value.name] = Initializer(value, None, offset, length)
        return value.name

    def _rounded(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        if tensor.dtype == dtype:
            yield tensor
            return
        for part in torch.split(tensor.reshape(-1), BLOCK_ELEMENTS):
            rounded = part.to(dtype)
            if dtype.is_floating_point and not all_finite(rounded):
                raise CheckpointError(
                    f"{name} holds numbers beyond {str(dtype).removeprefix('torch.')} (or NaN); export with fp32"
                )
            yield rounded
