"""Quantized weights for ONNX Runtime: bytes against literal twins, products against float64, one operator at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_folders import round_weight

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.onnx_file import model_bytes
from cann_llm_quant.export.onnx_graph import DATA_FILE, ELEMENT_TYPES, DataFile, Graph, Value
from cann_llm_quant.export.onnx_ort import OrtDialect, pack_blocks, pack_zero_points
from cann_llm_quant.models.decoder import DenseLinear
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.quant.activations import InputQuantizer, InputRange
from cann_llm_quant.quant.number_formats import to_values
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, ActivationScheme, QuantizedTensor, Scheme

ORT, STANDARD = OrtDialect(), OrtDialect(contrib=False)


def run(folder: Path, build: Any, feeds: dict[str, np.ndarray], dialect: OrtDialect = ORT) -> tuple[np.ndarray, Graph]:
    """What ONNX Runtime computes of the graph that `build` adds to; its result must have two dimensions."""
    import onnxruntime

    folder.mkdir(exist_ok=True)
    with HashedFile(folder / DATA_FILE) as file:
        data = DataFile(file)
        graph = Graph(dialect.opset, data)
        for name, value in feeds.items():
            kind = ELEMENT_TYPES[torch.from_numpy(value).dtype]
            graph.inputs.append(Value(name, kind, tuple(f"{name}_{axis}" for axis in range(value.ndim))))
        result = build(graph)
    floats = next((value for value in feeds.values() if value.dtype != np.int64), np.zeros(0, np.float32))
    kind = ELEMENT_TYPES[torch.from_numpy(floats).dtype]
    graph.outputs.append(Value(graph.rename(result, "y"), kind, ("rows", "columns")))
    (folder / "model.onnx").write_bytes(model_bytes(graph, "test"))
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(["y"], feeds)[0], graph


def random_inputs(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def random_weight(out: int, columns: int, scheme: Scheme, seed: int = 1) -> QuantizedTensor:
    w = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) + 0.1
    own = scheme.is_integer and scheme.strategy in ("group", "channel")
    return round_weight(w, scheme) if own else solve(w, scheme, torch.bfloat16)


def exact(weight: QuantizedTensor) -> np.ndarray:
    """(code - zero_point) * scale in float64, a column at a time from the definition."""
    out, columns = weight.shape
    width = weight.scheme.columns_per_scale(columns)
    groups = weight.group_index.tolist() if weight.group_index is not None else [c // width for c in range(columns)]
    values = to_values(weight.codes, weight.scheme.dtype)
    w = np.empty((out, columns))
    for row in range(out):
        at = {"tensor": 0, "tile": row // 128}.get(weight.scheme.strategy, row)
        for column in range(columns):
            zero = 0 if weight.zero_point is None else int(weight.zero_point[at, groups[column]])
            w[row, column] = (float(values[row, column]) - zero) * float(weight.scale[at, groups[column]])
    return w


def test_golden_bytes_of_a_block() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(1, 16)
    assert pack_blocks(codes, 4, 16).flatten().tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert pack_blocks(codes, 8, 16).flatten().tolist() == list(range(120, 136))
    two = torch.tensor([[-2, -1, 0, 1] * 4], dtype=torch.int8)
    assert pack_blocks(two, 2, 16).flatten().tolist() == [0b11100100] * 4
    assert pack_zero_points(torch.tensor([[-8, 7, 0]], dtype=torch.int8), 4).tolist() == [[0xF0, 0x08]]


@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([16, 32]),
    out=st.integers(1, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_packing_equals_its_literal_twin(bits: int, block: int, out: int, columns: int, seed: int) -> None:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-half, half, (out, columns), generator=generator).to(torch.int8)
    blocks = -(-columns // block)
    expected = np.zeros((out, blocks, block * bits // 8), dtype=np.uint8)
    for row in range(out):
        for column in range(blocks * block):
            code = int(codes[row, column]) if column < columns else 0
            place, bit = divmod(column % block * bits, 8)
            expected[row, column // block, place] |= (code + half) << bit
    assert np.array_equal(pack_blocks(codes, bits, block).numpy(), expected)
    zeros = np.zeros((out, -(-columns * bits // 8)), dtype=np.uint8)
    for row in range(out):
        for column in range(columns):
            place, bit = divmod(column * bits, 8)
            zeros[row, place] |= (int(codes[row, column]) + half) << bit
    assert np.array_equal(pack_zero_points(codes, bits).numpy(), zeros)


SCHEMES = [
    *[Scheme(f"int{bits}", symmetric, "group", 32) for bits in (2, 3, 4, 5, 6, 8) for symmetric in (True, False)],
    *[Scheme("int4", False, "group", size) for size in (4, 12, 16, 48, 96)],
    *[Scheme(kind, symmetric, "channel", None) for kind in ("int4", "int8") for symmetric in (True, False)],
    Scheme("int8", True, "tensor", None),
    Scheme("int8", True, "tile", None),
    Scheme("fp8_e4m3", True, "channel", None),
    Scheme("fp8_e4m3", True, "tile", None),
    MXFP8,
    MXFP4,
    NVFP4,
]


@pytest.mark.parametrize("dialect", [ORT, STANDARD], ids=["contrib", "standard"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.label)
def test_products_are_exact(tmp_path: Path, scheme: Scheme, dialect: OrtDialect) -> None:
    out, columns = (150, 192) if scheme.strategy == "tile" else (11, 96)
    weight, x = random_weight(out, columns, scheme), random_inputs(3, columns)
    bias = torch.linspace(-1, 1, out)

    def build(graph: Graph) -> str:
        matrix = dialect.store(graph, "w", weight, torch.float32)
        return dialect.product(graph, "x", matrix, None, bias, torch.float32)

    y, graph = run(tmp_path, build, {"x": x}, dialect)
    assert np.allclose(y, x.astype(np.float64) @ exact(weight).T + bias.numpy(), rtol=1e-5, atol=2e-5)
    kinds = {node.kind for node in graph.nodes}
    fits = dialect.contrib and (scheme.group_size or 32) % 16 == 0 and scheme.dtype != "fp8_e4m3"
    assert ("MatMulNBits" in kinds) == fits
    assert ("DequantizeLinear" in kinds) != fits


def test_a_row_that_no_block_divides(tmp_path: Path) -> None:
    weight, x = random_weight(6, 52, Scheme("int4", False, "channel", None)), random_inputs(2, 52)

    def build(graph: Graph) -> str:
        return ORT.product(graph, "x", ORT.store(graph, "w", weight, torch.float32), None, None, torch.float32)

    y, graph = run(tmp_path, build, {"x": x})
    assert np.allclose(y, x.astype(np.float64) @ exact(weight).T, rtol=1e-5, atol=1e-5)
    assert graph.nodes[0].attributes["block_size"] == 32


def test_c20_groups_of_scattered_columns_are_honoured(tmp_path: Path) -> None:
    plain = random_weight(8, 64, Scheme("int4", False, "group", 16))
    index = torch.randperm(64, generator=torch.Generator().manual_seed(5)).to(torch.int32) // 16
    weight = QuantizedTensor(plain.codes, plain.scale, plain.zero_point, plain.scheme, group_index=index)
    x = random_inputs(3, 64)

    def build(graph: Graph) -> str:
        return ORT.product(graph, "x", ORT.store(graph, "w", weight, torch.float32), None, None, torch.float32)

    y, _ = run(tmp_path, build, {"x": x})
    assert np.allclose(y, x.astype(np.float64) @ exact(weight).T, rtol=1e-5, atol=1e-5)
    index[0] = (index[0] + 1) % 4
    with pytest.raises(CheckpointError, match="g_idx"):
        run(tmp_path, build, {"x": x})


@pytest.mark.parametrize("dialect", [ORT, STANDARD], ids=["contrib", "standard"])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int8", True, "channel", None),
        Scheme("int4", False, "group", 16),
        Scheme("int2", True, "group", 32),
        Scheme("int8", False, "group", 12),
        Scheme("int4", True, "group", 12),
        Scheme("fp8_e4m3", True, "channel", None),
    ],
    ids=Scheme.label,
)
def test_a_table_is_looked_up_and_multiplies(tmp_path: Path, scheme: Scheme, dialect: OrtDialect) -> None:
    columns = 60 if scheme.group_size == 12 else 96
    weight = random_weight(40, columns, scheme)

    def build(graph: Graph) -> str:
        matrix = dialect.store(graph, "w", weight, torch.float32, table=True)
        rows = dialect.lookup(graph, "ids", matrix, torch.float32)
        return dialect.product(graph, rows, matrix, None, None, torch.float32)

    ids = np.array([0, 39, 7, 7], dtype=np.int64)
    y, _ = run(tmp_path, build, {"ids": ids}, dialect)
    w = exact(weight)
    assert np.allclose(y, w[ids] @ w.T, rtol=1e-5, atol=1e-4)


INPUTS = [
    (ActivationScheme(), None),
    (ActivationScheme(symmetric=False), None),
    (ActivationScheme(strategy="tensor"), None),
    (ActivationScheme(dtype="int4"), None),
    (ActivationScheme(strategy="group", group_size=32), None),
    (ActivationScheme(symmetric=False, strategy="group", group_size=32), None),
    (ActivationScheme(dynamic=False, strategy="tensor"), InputRange(torch.tensor([0.02]))),
    (
        ActivationScheme(symmetric=False, dynamic=False, strategy="tensor"),
        InputRange(torch.tensor([0.02]), torch.tensor([-9], dtype=torch.int8)),
    ),
]


@pytest.mark.parametrize("scheme", [Scheme("int8", True, "channel", None), Scheme("int4", False, "group", 32)])
@pytest.mark.parametrize(("inputs", "fixed"), INPUTS)
def test_quantized_inputs_are_those_of_the_runner(
    tmp_path: Path, scheme: Scheme, inputs: ActivationScheme, fixed: InputRange | None
) -> None:
    weight, x = random_weight(9, 64, scheme), random_inputs(5, 64)
    x[3] = 0
    quantizer = InputQuantizer(inputs, fixed)
    bias = torch.linspace(-1, 1, 9)

    def build(graph: Graph) -> str:
        matrix = ORT.store(graph, "w", weight, torch.float32, inputs=quantizer)
        return ORT.product(graph, "x", matrix, quantizer, bias, torch.float32)

    y, graph = run(tmp_path, build, {"x": x})
    ours = QuantizedInputLinear(DenseLinear(weight.dequantize()), quantizer, bias)(torch.from_numpy(x))
    assert np.allclose(y, ours.numpy(), rtol=1e-5, atol=1e-5)
    integers = scheme.dtype == "int8" and inputs.strategy != "group"
    assert any(node.kind == "MatMulInteger" for node in graph.nodes) == integers
    used = {name for node in graph.nodes for name in node.inputs}
    assert graph.initializers.keys() <= used


def test_sums_of_the_largest_integers_do_not_saturate(tmp_path: Path) -> None:
    codes = torch.tensor([[127], [-128]], dtype=torch.int8).repeat(1, 512)
    weight = QuantizedTensor(codes, torch.ones(2, 1), None, Scheme("int8", True, "channel", None))
    quantizer = InputQuantizer(ActivationScheme(dynamic=False, strategy="tensor"), InputRange(torch.ones(1)))
    x = np.full((2, 512), 127, dtype=np.float32)
    x[1] = -128

    def build(graph: Graph) -> str:
        matrix = ORT.store(graph, "w", weight, torch.float32, inputs=quantizer)
        return ORT.product(graph, "x", matrix, quantizer, None, torch.float32)

    y, _ = run(tmp_path, build, {"x": x})
    assert y.tolist() == [[512 * 127 * 127, 512 * 127 * -128], [512 * -128 * 127, 512 * 128 * 128]]


def test_float16_scales_are_stored_or_refused(tmp_path: Path) -> None:
    weight, x = random_weight(8, 64, Scheme("int4", False, "group", 32)), random_inputs(2, 64).astype(np.float16)

    def build(graph: Graph) -> str:
        return ORT.product(graph, "x", ORT.store(graph, "w", weight, torch.float16), None, None, torch.float16)

    y, _ = run(tmp_path, build, {"x": x})
    assert y.dtype == np.float16
    assert np.allclose(y, x.astype(np.float64) @ exact(weight).T, rtol=5e-3, atol=5e-3)
    weight = QuantizedTensor(weight.codes, torch.full((8, 2), 1e5), weight.zero_point, weight.scheme)
    with pytest.raises(CheckpointError, match=r"w\.scales holds numbers beyond float16"):
        run(tmp_path, build, {"x": x})


def test_nothing_is_refused() -> None:
    for scheme in SCHEMES:
        assert ORT.refusal("m", scheme, None, (150, 192)) is None
        assert ORT.nearest(scheme, (150, 192)) is None
