"""The dialect for CANN against a reference of its operator: golden words, single products, and whole models."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_folders import round_weight

pytest.importorskip("onnx")

import onnx
from cann_operator import evaluate, unpacked, weight_quant_matmul
from onnx_runs import export, random_ids, reference, save_quantized

from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.onnx_cann import COMMAND_FILE, OPERATOR, CannDialect, pack_transposed
from cann_llm_quant.export.onnx_file import model_bytes
from cann_llm_quant.export.onnx_graph import DATA_FILE, ELEMENT_TYPES, DataFile, Graph, Value
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, ActivationScheme, QuantizedTensor, Scheme

CANN = CannDialect()


def test_c19_words_are_two_s_complement_with_the_first_column_lowest() -> None:
    words = pack_transposed(torch.arange(-8, 8, dtype=torch.int8).view(16, 1))
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0xFEDCBA98, 0x76543210]


@given(rows=st.integers(1, 9), words=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_packed_columns_come_back(rows: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (words * 8, rows), generator=generator).to(torch.int8)
    assert np.array_equal(unpacked(pack_transposed(codes).numpy()), codes.numpy().T)


def run(folder: Path, build: Any, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, Graph]:
    """What the reference evaluator computes of the graph that `build` adds to, in float16."""
    with HashedFile(folder / DATA_FILE) as file:
        data = DataFile(file)
        graph = Graph(CANN.opset, data)
        for name, value in feeds.items():
            kind = ELEMENT_TYPES[torch.from_numpy(value).dtype]
            graph.inputs.append(Value(name, kind, tuple(f"{name}_{axis}" for axis in range(value.ndim))))
        result = graph.rename(build(graph), "y")
    graph.outputs.append(Value(result, ELEMENT_TYPES[torch.float16], ("rows", "columns")))
    (folder / "model.onnx").write_bytes(model_bytes(graph, "test"))
    return evaluate(folder, feeds)["y"], graph


def random_weight(out: int, columns: int, scheme: Scheme) -> QuantizedTensor:
    w = torch.randn(out, columns, generator=torch.Generator().manual_seed(1)) + 0.1
    if not scheme.is_integer:
        return solve(w, scheme, torch.float16)
    weight = round_weight(w, scheme)
    return QuantizedTensor(weight.codes, weight.scale.to(torch.float16), weight.zero_point, scheme)


SCHEMES = [
    *[Scheme(f"int{bits}", symmetric, "group", 32) for bits in (2, 3, 4, 5, 6, 8) for symmetric in (True, False)],
    Scheme("int4", False, "group", 96),
    Scheme("int4", False, "channel", None),
    Scheme("int8", False, "channel", None),
    Scheme("int8", True, "channel", None),
    MXFP4,
]


@pytest.mark.parametrize("out", [16, 11])
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.label)
def test_products_are_exact(tmp_path: Path, scheme: Scheme, out: int) -> None:
    weight = random_weight(out, 96, scheme)
    assert CANN.refusal("m", scheme, None, (out, 96)) is None
    x = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float16)
    bias = torch.linspace(-1, 1, out).to(torch.float16)

    def build(graph: Graph) -> str:
        matrix = CANN.store(graph, "w", weight, torch.float16)
        return CANN.product(graph, "x", matrix, None, bias, torch.float16)

    y, graph = run(tmp_path, build, {"x": x})
    expected = x.astype(np.float64) @ weight.dequantize().double().numpy().T + bias.numpy()
    assert np.allclose(y, expected, rtol=2**-10, atol=2**-10)
    (node,) = (node for node in graph.nodes if node.kind == OPERATOR)
    assert len(node.inputs) == 7
    assert node.inputs[4:6] == ("", "")
    assert bool(node.inputs[3]) != scheme.symmetric
    packed = scheme.is_integer and scheme.bits <= 4 and out == 16
    assert graph.initializers["w.codes"].value.shape == ((96, 2) if packed else (96, out))


def test_c20_scattered_columns_are_gathered_first(tmp_path: Path) -> None:
    plain = random_weight(8, 64, Scheme("int4", False, "group", 32))
    index = torch.randperm(64, generator=torch.Generator().manual_seed(5)).to(torch.int32) // 32
    weight = QuantizedTensor(plain.codes, plain.scale, plain.zero_point, plain.scheme, group_index=index)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)

    def build(graph: Graph) -> str:
        return CANN.product(graph, "x", CANN.store(graph, "w", weight, torch.float16), None, None, torch.float16)

    y, _ = run(tmp_path, build, {"x": x})
    assert np.allclose(y, x.astype(np.float64) @ weight.dequantize().double().numpy().T, rtol=2**-10, atol=2**-9)


@pytest.mark.parametrize(
    "scheme", [Scheme("int8", True, "channel", None), Scheme("int4", False, "group", 32)], ids=Scheme.label
)
def test_a_table_is_looked_up_and_multiplies(tmp_path: Path, scheme: Scheme) -> None:
    weight = random_weight(24, 64, scheme)

    def build(graph: Graph) -> str:
        matrix = CANN.store(graph, "w", weight, torch.float16, table=True)
        return CANN.product(graph, CANN.lookup(graph, "ids", matrix, torch.float16), matrix, None, None, torch.float16)

    ids = np.array([0, 23, 7, 7], dtype=np.int64)
    y, _ = run(tmp_path, build, {"ids": ids})
    w = weight.dequantize().double().numpy()
    assert np.allclose(y, w[ids] @ w.T, rtol=1e-2, atol=1e-2)


MODELS: dict[str, tuple[str, Scheme, dict[str, Any]]] = {
    "llama": ("llama", Scheme("int4", False, "group", 32), {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", Scheme("int8", True, "channel", None), {"head_dim": 16, "num_hidden_layers": 1}),
    "mixtral": ("mixtral", Scheme("int4", True, "group", 32), {"num_hidden_layers": 1, "num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", Scheme("int4", False, "channel", None), {"num_hidden_layers": 1}),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_model_equals_our_decoder_and_goes_on_with_its_cache(tmp_path: Path, model: str) -> None:
    family, scheme, config = MODELS[model]
    packed = save_quantized(tmp_path, family, scheme, **config)
    folder = export(packed, tmp_path / "onnx", CANN).path
    ids = random_ids(2, 7)
    expected = reference(packed, ids)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 17)]
    pasts = {
        value.name: np.zeros((2, value.type.tensor_type.shape.dim[1].dim_value, 0, 16), np.float16)
        for value in proto.graph.input[3:]
    }
    seen = []
    for start, end in ((0, 5), (5, 6), (6, 7)):
        feeds = {
            "input_ids": ids[:, start:end].numpy(),
            "attention_mask": np.ones((2, end), dtype=np.int64),
            "position_ids": np.arange(start, end)[None].repeat(2, axis=0),
        }
        outputs = evaluate(folder, feeds | pasts)
        pasts = {name: outputs[name.replace("past_key_values", "present")] for name in pasts}
        seen.append(outputs["logits"])
    got = np.concatenate(seen, axis=1)
    assert got.dtype == np.float16
    assert np.abs(got - expected).max() < 0.01 * np.abs(expected).max()


def test_the_command_compiles_this_graph(tmp_path: Path) -> None:
    packed = save_quantized(tmp_path, "llama", Scheme("int4", True, "group", 32), num_hidden_layers=1)
    folder = export(packed, tmp_path / "onnx", CannDialect(soc="Ascend910B3")).path
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "atc").write_text('#!/bin/sh\nfor option in "$@"; do printf "%s\\n" "$option"; done\n', encoding="utf-8")
    (fake / "atc").chmod(0o755)
    shell = shutil.which("sh")
    assert shell is not None
    done = subprocess.run(
        [shell, COMMAND_FILE],
        cwd=folder,
        env={"PATH": f"{fake}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    options = dict(line.removeprefix("--").split("=", 1) for line in done.stdout.splitlines())
    assert options["soc_version"] == "Ascend910B3"
    assert options["framework"] == "5"
    assert (folder / options["model"]).is_file()
    shapes = dict(entry.split(":") for entry in options["input_shape"].split(";"))
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    assert list(shapes) == [value.name for value in graph.input]
    assert shapes["input_ids"] == "-1,-1"
    assert shapes["past_key_values.0.key"] == "-1,2,-1,16"
    text = (folder / COMMAND_FILE).read_text(encoding="utf-8")
    assert "did not compile" in text
    assert all(len(shlex.split(line.rstrip("\\"))) <= 3 for line in text.splitlines()[4:])


def test_a_name_of_an_npu_is_no_shell_text() -> None:
    with pytest.raises(UsageError, match="SoC version"):
        CannDialect(soc='"; rm -rf / #')


def test_refusals_and_what_would_be_rounded_to() -> None:
    shape = (64, 96)
    narrow = Scheme("int4", True, "group", 16)
    assert re.search("groups of 16 columns.*multiples of 32", str(CANN.refusal("m", narrow, None, shape)))
    assert CANN.nearest(narrow, shape) == Scheme("int4", True, "group", 32)
    assert CANN.refusal("m", Scheme("int4", True, "group", 96), None, shape) is None
    assert CANN.nearest(Scheme("int4", False, "group", 16), (64, 48)) == Scheme("int4", False, "channel", None)
    assert "small floats" in str(CANN.refusal("m", Scheme("fp8_e4m3", True, "channel", None), None, shape))
    large = (70000, 96)
    assert "70000 rows or columns" in str(CANN.refusal("m", Scheme("int8", True, "channel", None), None, large))
    assert CANN.nearest(Scheme("int8", True, "channel", None), large) is None


def test_refused_linears_are_named_before_any_work(tmp_path: Path) -> None:
    packed = save_quantized(tmp_path, "llama", Scheme("int4", True, "group", 16), num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=r"layers\.0\..*groups of 16 columns.*and 6 more linears"):
        export(packed, tmp_path / "onnx", "cann")
    assert not list(tmp_path.glob("onnx*"))


def test_what_is_not_computed_as_the_source_says_is_warned_of(tmp_path: Path) -> None:
    scheme, inputs = Scheme("int8", True, "channel", None), ActivationScheme()
    packed = save_quantized(tmp_path, "qwen2_moe", scheme, inputs=inputs, num_hidden_layers=1)
    warnings = export(packed, tmp_path / "onnx", "cann").warnings
    assert [warning.split(":")[0].split(",")[0] for warning in warnings] == [
        "inputs stay in float",
        "every expert sees every token",
    ]


def test_the_reference_refuses_groups_that_the_operator_does_not_take() -> None:
    with pytest.raises(AssertionError):
        weight_quant_matmul(np.ones((1, 32)), np.ones((32, 4), np.int8), np.ones((2, 4)), group_size=16)
