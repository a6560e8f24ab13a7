"""The folder that an ONNX export leaves: whole or not there, the same every time, made a matrix at a time."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx_runs import OrtRun, export, random_ids, reference, save_quantized
from safetensors.torch import load_file, save_file

from cann_llm_quant.errors import CheckpointError, UnsupportedError, UsageError
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.onnx_cann import CannDialect
from cann_llm_quant.export.onnx_export import dialect_of, export_onnx
from cann_llm_quant.export.onnx_ort import OrtDialect
from cann_llm_quant.export.packed_model import packed_model
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

INT4 = Scheme("int4", False, "group", 32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, biases, a tied head."""
    folder = tmp_path_factory.mktemp("packed")
    return save_quantized(
        folder, "llama", INT4, num_hidden_layers=1, attention_bias=True, tie_word_embeddings=True, vocab_size=1000
    )


@pytest.fixture(scope="module")
def exported(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model for ONNX Runtime."""
    return export(packed, tmp_path_factory.mktemp("exported") / "onnx").path


def test_c31_files_are_all_there_and_sum_up(packed: Path, exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert {"model.onnx", "model.onnx.data", "config.json", "export.json", "SHA256SUMS", "tokenizer.json"} <= names
    for line in (exported / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest
        names.discard(name)
    assert names == {"SHA256SUMS"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (packed / name).read_bytes()
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "float32"


def test_weights_lie_outside_the_model_one_after_another(exported: Path) -> None:
    graph = onnx.load(exported / "model.onnx", load_external_data=False).graph
    end = 0
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert len(tensor.raw_data) <= 1024
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "model.onnx.data"
        assert int(place["offset"]) % 4096 == 0
        assert end <= int(place["offset"]) < end + 4096
        end = int(place["offset"]) + int(place["length"])
    assert (exported / "model.onnx.data").stat().st_size == end
    assert (exported / "model.onnx").stat().st_size < 64_000


def test_c21_a_tied_head_reads_the_embedding_s_constant(exported: Path) -> None:
    graph = onnx.load(exported / "model.onnx", load_external_data=False).graph
    wide = [tensor.name for tensor in graph.initializer if 1000 in tensor.dims]
    assert wide == ["model.embed_tokens.weight"]
    readers = [node.op_type for node in graph.node if wide[0] in node.input]
    assert readers == ["Gather", "Gemm"]


def test_checker_and_shape_inference_find_every_type(exported: Path) -> None:
    onnx.checker.check_model(str(exported / "model.onnx"), full_check=False)
    model = onnx.load(exported / "model.onnx")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    known = {value.name: value for value in [*inferred.value_info, *inferred.output]}
    for node in inferred.node:
        for name in node.output:
            assert known[name].type.tensor_type.HasField("shape"), f"{name} has no shape"
    names = [dim.dim_param or dim.dim_value for dim in known["logits"].type.tensor_type.shape.dim]
    assert names == ["batch_size", "sequence_length", 1000]
    keys = [dim.dim_param or dim.dim_value for dim in known["present.0.key"].type.tensor_type.shape.dim]
    assert keys == ["batch_size", 2, "total_sequence_length", 16]


def test_the_same_bytes_every_time(packed: Path, exported: Path, tmp_path: Path) -> None:
    again = export(packed, tmp_path / "again").path
    for path in exported.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_standard_operators_alone_compute_the_same(packed: Path, tmp_path: Path) -> None:
    folder = export(packed, tmp_path / "onnx", OrtDialect(contrib=False)).path
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    assert {node.domain for node in onnx.load(folder / "model.onnx").graph.node} == {""}
    ids = random_ids(1, 9)
    assert np.abs(OrtRun(folder, batch=1)(ids) - reference(packed, ids)).max() < 1e-5


def test_float16_stays_near(packed: Path, tmp_path: Path) -> None:
    folder = export(packed, tmp_path / "onnx", dtype="fp16").path
    ids = random_ids(1, 9)
    expected = reference(packed, ids)
    assert np.abs(OrtRun(folder, batch=1)(ids) - expected).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("inputs", [None, ActivationScheme(strategy="group", group_size=32)])
def test_experts_that_no_token_is_routed_to(tmp_path: Path, dtype: str, inputs: ActivationScheme | None) -> None:
    few = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 1}
    packed = save_quantized(tmp_path, "qwen3_moe", INT4, inputs=inputs, **few)
    ids = random_ids(1, 3)
    expected = reference(packed, ids)
    got = OrtRun(export(packed, tmp_path / "onnx", dtype=dtype).path, batch=1)(ids)
    assert np.abs(got - expected).max() < (1e-5 if dtype == "fp32" else 0.02) * np.abs(expected).max()


def test_bfloat16_for_cann_has_float32_biases(packed: Path, tmp_path: Path) -> None:
    graph = onnx.load(export(packed, tmp_path / "onnx", "cann", dtype="bf16").path / "model.onnx").graph
    kinds = {tensor.name.split(".", 3)[-1]: tensor.data_type for tensor in graph.initializer}
    assert kinds["self_attn.q_proj.bias"] == onnx.TensorProto.FLOAT
    assert kinds["self_attn.q_proj.scales"] == onnx.TensorProto.BFLOAT16
    assert {value.type.tensor_type.elem_type for value in graph.input[3:]} == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("inputs", [ActivationScheme(), ActivationScheme(symmetric=False)])
def test_quantized_inputs_run_as_in_our_decoder(tmp_path: Path, inputs: ActivationScheme) -> None:
    packed = save_quantized(tmp_path, "qwen2", Scheme("int8", True, "channel", None), inputs=inputs)
    written = export(packed, tmp_path / "onnx")
    assert written.warnings == ()
    ids = random_ids(2, 9)
    expected = reference(packed, ids)
    # a product that lies on the edge between two codes may fall to either side
    assert np.median(np.abs(OrtRun(written.path, batch=2)(ids) - expected)) < 1e-4
    kinds = [node.op_type for node in onnx.load(written.path / "model.onnx").graph.node]
    assert kinds.count("MatMulInteger") == 14


def test_dynamic_rope_takes_the_base_of_the_text_s_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    packed = save_quantized(tmp_path, "llama", INT4, rope_parameters=rope, max_position_embeddings=8)
    folder = export(packed, tmp_path / "onnx").path
    for length in (6, 20):
        ids = random_ids(1, length)
        assert np.abs(OrtRun(folder, batch=1)(ids) - reference(packed, ids)).max() < 5e-5


def test_numbers_beyond_float16_are_refused_and_leave_nothing(packed: Path, tmp_path: Path) -> None:
    with open_native(packed) as checkpoint:
        model, load = packed_model(checkpoint), checkpoint.load

        def too_large(name: str) -> torch.Tensor:
            tensor = load(name)
            return tensor * 1e9 if name == "model.norm.weight" else tensor

        checkpoint.load = too_large  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds numbers beyond float16"):
            export_onnx(checkpoint, model, tmp_path / "onnx", dtype="fp16")
    assert not (tmp_path / "onnx").exists()
    assert OrtRun(export(packed, tmp_path / "onnx", dtype="fp16").path, batch=1) is not None


def test_overwrite_replaces_an_export_alone(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "onnx"
    export(packed, out)
    with pytest.raises(UsageError, match="exists already"):
        export(packed, out)
    with open_native(packed) as checkpoint:
        export_onnx(checkpoint, packed_model(checkpoint), out, dialect="cann", overwrite=True)
    assert (out / "atc_command.sh").is_file()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("", encoding="utf-8")
    with open_native(packed) as checkpoint, pytest.raises(UsageError, match="no output of this tool"):
        export_onnx(checkpoint, packed_model(checkpoint), tmp_path / "precious", overwrite=True)


def test_one_matrix_is_held_at_a_time(packed: Path, tmp_path: Path) -> None:
    """Whatever `load` and `quantized` gave before is let go when the next is asked for."""
    import weakref

    with open_native(packed) as checkpoint:
        model = packed_model(checkpoint)
        alive: list[weakref.ref[Any]] = []
        most = 0

        def counted(give: Any) -> Any:
            def wrapper(name: str) -> Any:
                nonlocal most
                result = give(name)
                if result is not None and not (isinstance(result, torch.Tensor) and result.dim() == 1):
                    alive.append(weakref.ref(result))
                most = max(most, sum(ref() is not None for ref in alive))
                return result

            return wrapper

        checkpoint.load = counted(checkpoint.load)  # type: ignore[method-assign]
        checkpoint.quantized = counted(checkpoint.quantized)  # type: ignore[method-assign]
        export_onnx(checkpoint, model, tmp_path / "onnx")
    assert len(alive) == 8
    assert most == 1


def test_c29_tensors_that_no_decoder_reads_are_reported(packed: Path, tmp_path: Path) -> None:
    source = shutil.copytree(packed, tmp_path / "packed")
    tensors = load_file(source / "model.safetensors") | {"model.mtp.0.norm.weight": torch.ones(4)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (warning,) = export(source, tmp_path / "onnx").warnings
    assert warning == "1 tensors that the decoder does not read are left out: model.mtp.0.norm.weight, ..."


def test_options_that_cannot_be_are_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown ONNX dialect 'tensorrt'; choose ort or cann"):
        dialect_of("tensorrt")
    with pytest.raises(UsageError, match="cann dialect computes in fp16 or bf16, not in 'fp32'"):
        export(packed, tmp_path / "onnx", CannDialect(), dtype="fp32")
    floats = save_quantized(tmp_path, "llama", Scheme("fp8_e4m3", True, "channel", None), num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=r"_proj \(fp8_e4m3-channel\) is of small floats.*--requantize"):
        export(floats, tmp_path / "onnx", "cann")
    assert not list(tmp_path.glob("onnx*"))
