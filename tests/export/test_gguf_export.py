"""The GGUF export of whole folders: read by the gguf package, read back, refused where llama.cpp would differ."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_exports import packed_model, save_byte_level
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.gguf_reader import GgufCheckpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError, UsageError
from cann_llm_quant.export.gguf_export import WrittenGguf, export_gguf, plan_gguf
from cann_llm_quant.export.gguf_reader import GgufReader
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import Scheme

VOCAB = 416  # more rows than the tokenizer has tokens
INT4, INT4_ASYM = Scheme("int4", True, "group", 32), Scheme("int4", False, "group", 32)
INT8 = Scheme("int8", True, "channel", None)
FAMILIES: dict[str, dict] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"decoder_sparse_step": 1},
    "qwen3_moe": {"decoder_sparse_step": 1, "norm_topk_prob": True},
}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def make(folder: Path, family: str, scheme: Scheme, **config) -> Path:
    """A native folder of a tiny model with a byte-level tokenizer."""
    base = "llama" if family == "mistral" else family
    source = save_tiny(folder / "float", base, vocab_size=VOCAB, **(FAMILIES[family] | config))
    save_byte_level(source)
    if family == "mistral":
        set_config(source, model_type="mistral", sliding_window=None)
    return save_native(source, folder / "native", scheme)


def set_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(config), encoding="utf-8")


def export(native: Path, out: Path, **options) -> WrittenGguf:
    with open_native(native) as checkpoint:
        return export_gguf(checkpoint, packed_model(checkpoint), out, **options)


def plan(native: Path, **options):
    with open_native(native) as checkpoint:
        return plan_gguf(checkpoint, packed_model(checkpoint), **options)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_comes_back_in_the_same_codes(tmp_path: Path, family: str):
    native = make(tmp_path, family, INT4)
    written = export(native, tmp_path / "out", float_type="F32")
    assert written.file.name == "model-Q4_0.gguf"
    with open_native(native) as source, open_checkpoint(str(written.path)) as inner:
        back = PackedCheckpoint(inner, GgufReader(inner))
        routers = {module for module in source.modules if module.endswith("block_sparse_moe.gate")}  # always F32
        assert back.modules == source.modules - routers
        assert set(back.tensors) == set(source.tensors)
        for module in back.modules:
            one, other = source.quantized(module), back.quantized(module)
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.scale.float(), other.scale.float())
        for name in source.tensors:
            assert torch.equal(source.load(name), back.load(name)), name
        mine, theirs = arch_from_checkpoint(source), arch_from_checkpoint(back)
        assert theirs.layers == mine.layers
        assert replace(theirs, model_type=mine.model_type, max_positions=0) == replace(mine, max_positions=0)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_names_shapes_and_metadata_are_what_the_gguf_package_knows(tmp_path: Path, family: str):
    written = export(make(tmp_path, family, INT8), tmp_path / "out")
    reader = gguf.GGUFReader(written.file)
    names = gguf.MODEL_ARCH_NAMES
    arch = next(key for key, value in names.items() if value == ARCHITECTURES.get(family, family))
    allowed = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    for tensor in reader.tensors:
        block = tensor.name.removesuffix(".weight").removesuffix(".bias").split(".")
        generic = ".".join(["blk", "{bid}", block[2]] if block[0] == "blk" else block)
        assert generic in allowed
        vector = tensor.shape.size == 1 or "ffn_gate_inp" in tensor.name
        wanted = gguf.GGMLQuantizationType.F32 if vector else gguf.GGMLQuantizationType.Q8_0
        outer = tensor.name in ("token_embd.weight", "output.weight")
        assert tensor.tensor_type == (gguf.GGMLQuantizationType.BF16 if outer else wanted)
    value = {key: field.contents() for key, field in reader.fields.items()}
    prefix = names[arch]
    assert value["general.architecture"] == prefix
    assert value["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert value[f"{prefix}.attention.head_count"] == 4
    assert value[f"{prefix}.attention.head_count_kv"] == 2
    assert value[f"{prefix}.block_count"] == 2
    assert len(value["tokenizer.ggml.tokens"]) == VOCAB
    assert value["tokenizer.ggml.tokens"][-1] == "[PAD415]"
    assert value["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED
    known = {v for part in vars(gguf.Keys).values() if isinstance(part, type) for v in vars(part).values()}
    ours = {key for key in reader.fields if not key.startswith(("GGUF.", "cann_llm_quant."))}
    assert {key.replace(prefix, "{arch}", 1) if key.startswith(prefix) else key for key in ours} <= known


def test_q_and_k_are_interleaved_for_llama_only(tmp_path: Path):
    for family in ("llama", "qwen2"):
        native = make(tmp_path / family, family, INT8)
        written = export(native, tmp_path / family / "out", float_type="F32")
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(written.file).tensors}
        with open_native(native) as source:
            w = source.load("model.layers.1.self_attn.k_proj.weight").numpy()
            bias = source.load("model.layers.1.self_attn.k_proj.bias").float().numpy()
        if family == "llama":  # two heads of 16: row (head, half, i) lies at (head, i, half)
            order = [head * 16 + half * 8 + i for head in range(2) for i in range(8) for half in range(2)]
            w, bias = w[order], bias[order]
        tensor = stored["blk.1.attn_k.weight"]
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), w)
        assert np.array_equal(stored["blk.1.attn_k.bias"].data, bias)


def test_zero_points_survive_and_the_error_of_a_minimum_is_bounded(tmp_path: Path):
    native = make(tmp_path, "llama", INT4_ASYM)
    written = export(native, tmp_path / "out")
    assert written.file.name == "model-Q4_1.gguf"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(written.file).tensors}
    with open_native(native) as source, open_checkpoint(str(written.file)) as inner:
        reader = GgufReader(inner)
        for module in source.modules:
            one, other = source.quantized(module), reader.quantized(module)
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.zero_point, other.zero_point)
            assert torch.equal(one.scale.float(), other.scale.float())
        weight = source.quantized("model.layers.0.mlp.up_proj")
        tensor = stored["blk.0.ffn_up.weight"]
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        steps = np.abs(read - weight.dequantize().numpy()) / weight.scale.float().repeat_interleave(32, 1).numpy()
        assert 0 < steps.max() < 0.008


def foreign(folder: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The blocks that the gguf package makes of a model's matrices."""
    native = make(folder, "llama", INT8, tie_word_embeddings=True, num_hidden_layers=1)
    tensors = gguf.GGUFReader(export(native, folder / "f32", float_type="F32").file).tensors
    writer = gguf.GGUFWriter(folder / "foreign.gguf", "llama")
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    for tensor in tensors:
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        matrix = w.ndim > 1
        writer.add_tensor(
            tensor.name, gguf.quants.quantize(w, kind) if matrix else w, raw_dtype=kind if matrix else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "foreign.gguf"


def test_q4_1_of_another_tool_is_read_as_floats(tmp_path: Path):
    with open_checkpoint(str(foreign(tmp_path, gguf.GGMLQuantizationType.Q4_1))) as checkpoint:
        assert GgufReader(checkpoint).linears == {}


def test_q4_0_of_another_tool_is_read_in_codes(tmp_path: Path):
    with open_checkpoint(str(foreign(tmp_path, gguf.GGMLQuantizationType.Q4_0))) as checkpoint:
        reader = GgufReader(checkpoint)
        assert len(reader.linears) == 8  # seven linears and the embedding, to which the head is tied
        assert reader.tied == {"lm_head": "model.embed_tokens"}
        for module in reader.linears:
            assert torch.equal(reader.quantized(module).dequantize(), checkpoint.load(f"{module}.weight"))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_float_models_are_written_in_the_type_that_is_asked_for(tmp_path: Path, kind: str, dtype: torch.dtype):
    source = save_tiny(tmp_path / "float", vocab_size=VOCAB)
    save_byte_level(source)
    with open_checkpoint(str(source)) as checkpoint:
        written = export_gguf(checkpoint, packed_model(checkpoint), tmp_path / "out", float_type=kind)
        assert written.file.name == f"model-{kind}.gguf"
        with GgufCheckpoint(written.file) as back:
            for name in checkpoint.tensors:
                w = checkpoint.load(name)
                assert torch.equal(back.load(name).float(), w.to(dtype if w.dim() > 1 else torch.float32).float())


def test_numbers_beyond_float16_are_refused_by_name(tmp_path: Path):
    native = make(tmp_path, "llama", INT8)
    tensors = load_file(native / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = 1e6
    save_file(tensors, native / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has numbers that float16 cannot hold.*F32"):
        export(native, tmp_path / "out", float_type="F16")
    assert not (tmp_path / "out").exists()


def test_sums_and_marker_beside_the_file(tmp_path: Path):
    native = make(tmp_path, "llama", INT8)
    steps: list[tuple[int, int]] = []
    written = export(native, tmp_path / "out", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(n + 1, written.tensors) for n in range(written.tensors)]
    assert written.nbytes == written.file.stat().st_size
    lines = (tmp_path / "out" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert set(sums) == names - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    marker = json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))
    assert marker["layout"] == "gguf"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (native / "tokenizer.json").read_bytes()


def test_a_killed_export_leaves_no_output_and_the_same_command_starts_again(tmp_path: Path):
    native = make(tmp_path, "llama", INT8)

    def kill(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(native, tmp_path / "out", progress=kill)
    assert not (tmp_path / "out").exists()
    first = export(native, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(UsageError, match="exists already"):
        export(native, tmp_path / "out")
    before = first.file.read_bytes()
    assert export(native, tmp_path / "out", overwrite=True).file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "native", "out"]


def test_llama3_scaling_is_a_tensor_of_divisors(tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    native = make(tmp_path, "llama", INT8, head_dim=64, rope_parameters=scaling)
    written = export(native, tmp_path / "out")
    with open_native(native) as source, open_checkpoint(str(written.file)) as back:
        assert "rope_freqs.weight" not in back.tensors
        assert back.config["rope_scaling"]["factor"] == 8.0
        mine, theirs = arch_from_checkpoint(source).rope, arch_from_checkpoint(back).rope
        assert theirs.kind == "llama3"
        assert theirs.parameters["original_max_position_embeddings"] == pytest.approx(64, abs=2)
        assert mine.theta == theirs.theta


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_in_the_metadata(tmp_path: Path, kind: str):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": 64}
    native = make(tmp_path, "qwen3", INT8, rope_parameters=scaling)
    written = export(native, tmp_path / "out")
    with open_native(native) as source, open_checkpoint(str(written.file)) as back:
        assert arch_from_checkpoint(back).rope == arch_from_checkpoint(source).rope


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some of its layers have experts"),
        ("qwen3", {"attention_bias": True}, "no bias on o"),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.0,
                }
            },
            "yarn attention factor",
        ),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 16.0,
                }
            },
            r"yarn ramp is from beta_fast, beta_slow = \(16.0, 1.0\)",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(tmp_path: Path, family, config, said):
    native = make(tmp_path, family, INT8, **config)
    with pytest.raises(UnsupportedError, match=f"{family}: .*{said}.*llama.cpp would compute another model"):
        export(native, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_what_is_refused_names_a_linear_and_the_way_out(tmp_path: Path):
    native = make(tmp_path, "llama", Scheme("int4", True, "group", 16))
    with pytest.raises(UnsupportedError, match=r"14 linears.*has scales of 16 columns.*13 more.*--requantize"):
        export(native, tmp_path / "out")


def test_experts_of_two_types_are_refused(tmp_path: Path):
    native = make(tmp_path, "qwen3_moe", INT4)
    with open_native(native) as checkpoint:
        model = packed_model(checkpoint)
        schemes = dict(model.schemes) | {"model.layers.1.mlp.experts.2.up_proj": INT8}
        with pytest.raises(UnsupportedError, match="layer 1: its experts' up are stored in 2 types"):
            plan_gguf(checkpoint, replace(model, schemes=schemes))


def test_a_window_shortens_the_context_and_is_warned_of(tmp_path: Path):
    native = make(tmp_path, "mistral", INT8)
    set_config(native, sliding_window=100)
    planned = plan(native)
    assert planned.metadata["llama.context_length"] == 100
    assert any("context_length is cut to 100" in warning for warning in planned.warnings)


def test_tensors_outside_the_map_are_left_out_with_a_warning(tmp_path: Path):
    native = make(tmp_path, "llama", INT8)
    tensors = load_file(native / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, native / "model.safetensors", metadata={"format": "pt"})
    (warning,) = plan(native).warnings
    assert "1 tensors that the decoder does not read are left out: model.layers.0.self_attn.rotary_emb" in warning


def test_a_word_level_tokenizer_is_refused_and_can_be_left_out(tmp_path: Path):
    native = save_native(save_tiny(tmp_path / "float"), tmp_path / "native", INT8)
    with pytest.raises(UnsupportedError, match=r"kind WordLevel.*--no-tokenizer"):
        plan(native)
    metadata = plan(native, tokenizer=False).metadata
    assert metadata["tokenizer.ggml.model"] == "none"
    assert metadata["llama.vocab_size"] == 128


def test_an_export_of_an_export_has_the_same_tensors(tmp_path: Path):
    first = export(make(tmp_path, "llama", INT4_ASYM), tmp_path / "one")
    with open_checkpoint(str(first.file)) as inner:
        checkpoint = PackedCheckpoint(inner, GgufReader(inner), None)
        second = export_gguf(checkpoint, packed_model(checkpoint, torch.float16), tmp_path / "two")
    one, two = (gguf.GGUFReader(written.file).tensors for written in (first, second))
    assert [(t.name, t.tensor_type) for t in one] == [(t.name, t.tensor_type) for t in two]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one, two, strict=True))
