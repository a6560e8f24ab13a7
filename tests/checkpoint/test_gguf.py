"""GGUF files that the gguf package wrote, read back under Hugging Face names."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    Kind,
    interleave,
    llama_layout,
    plain_layout,
    state_dict,
    write_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.gguf_writer import GgufWriter, TensorEntry
from cann_llm_quant.errors import CheckpointError, UnsupportedError

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS]
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_llama_tensors_in_every_type(tmp_path, kind):
    state = state_dict(1, bias=True, head=True)
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_layout(state), kind=kind)
    with open_checkpoint(str(path)) as checkpoint:
        assert set(checkpoint.tensors) == set(state)
        for name, w in state.items():
            stored = kind if w.ndim > 1 else Kind.F32
            # packing runs along columns, so that the row order does not change what a row dequantizes to
            expected = gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), stored), stored)
            loaded, info = checkpoint.load(name), checkpoint.tensors[name]
            assert loaded.dtype == info.dtype == FLOATS.get(stored, torch.float32)
            assert tuple(loaded.shape) == info.shape == tuple(w.shape)
            assert info.nbytes == loaded.nbytes
            assert np.array_equal(loaded.float().numpy(), expected)


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_dequantize_in_the_right_row_order(tmp_path, kind):
    # the gguf package cannot quantize to these, so the blocks are random bytes with finite scales
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (HEADS * 64, HIDDEN // elements * nbytes), dtype=np.uint8)
    rows &= 0x3B  # keeps every float16 in it finite
    layout = llama_layout(state_dict(1))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {"head_count": HEADS, "head_count_kv": KV_HEADS}.items():
        writer.add_uint32(f"llama.attention.{key}", value)
    writer.add_uint32("llama.embedding_length", HIDDEN)
    writer.add_uint32("llama.block_count", 1)
    writer.add_uint32("llama.context_length", 64)
    writer.add_uint32("llama.feed_forward_length", FFN)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", layout["token_embd.weight"])
    writer.add_tensor("blk.0.attn_q.weight", interleave(rows, HEADS), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = open_checkpoint(str(tmp_path / "m.gguf")).load("model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(loaded.numpy(), gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_weights(tmp_path, family):
    loader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    import transformers

    state = state_dict(2, bias=family == "qwen2", norms=family == "qwen3", head=True)
    layout = llama_layout(state) if family == "llama" else plain_layout(state)
    metadata = {"general.name": "x", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * VOCAB}
    metadata |= {f"{family}.attention.key_length": 64, f"{family}.rope.freq_base": 5e4}
    path = write_gguf(tmp_path / "m.gguf", family, layout, kind=Kind.Q8_0, metadata=metadata)
    checkpoint = open_checkpoint(str(path))
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert set(model.state_dict()) == set(checkpoint.tensors)
    theirs = loader(str(path), return_tensors=True, model_to_load=model)
    assert set(theirs["tensors"]) == set(checkpoint.tensors)
    for name, w in theirs["tensors"].items():
        assert torch.equal(w.float(), checkpoint.load(name).float()), name
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        assert theirs["config"][key] == checkpoint.config[key]
    assert config.rope_parameters["rope_theta"] == 5e4


def expert_stack(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(EXPERTS, rows, columns, generator=torch.Generator().manual_seed(seed))


def dense_without_mlp() -> dict[str, torch.Tensor]:
    return {name: w for name, w in state_dict(1).items() if ".mlp." not in name}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_mixtral_experts_are_slabs_of_the_stack(tmp_path, kind):
    stacks = {
        "gate": expert_stack(1, FFN, HIDDEN),
        "up": expert_stack(2, FFN, HIDDEN),
        "down": expert_stack(3, HIDDEN, FFN),
    }
    layout = llama_layout(dense_without_mlp())
    layout |= {f"blk.0.ffn_{role}_exps.weight": w.numpy() for role, w in stacks.items()}
    layout["blk.0.ffn_gate_inp.weight"] = np.ones((EXPERTS, HIDDEN), np.float32)
    metadata = {"llama.expert_count": EXPERTS, "llama.expert_used_count": 2}
    path = write_gguf(tmp_path / "m.gguf", "llama", layout, kind=kind, metadata=metadata)
    checkpoint = open_checkpoint(str(path))
    prefix = "model.layers.0.block_sparse_moe."
    for role, letter in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        for e in range(EXPERTS):
            name = f"{prefix}experts.{e}.{letter}.weight"
            expected = gguf.quants.dequantize(gguf.quants.quantize(stacks[role][e].numpy(), kind), kind)
            assert checkpoint.tensors[name].shape == stacks[role][e].shape
            assert np.array_equal(checkpoint.load(name).numpy(), expected)
    assert checkpoint.load(f"{prefix}gate.weight").shape == (EXPERTS, HIDDEN)
    config = checkpoint.config
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (EXPERTS, 2)
    assert config["intermediate_size"] == FFN


def test_mixtral_of_the_first_layout_with_one_tensor_per_expert(tmp_path):
    layout = llama_layout(dense_without_mlp())
    down = expert_stack(3, HIDDEN, FFN)
    layout |= {f"blk.0.ffn_down.{e}.weight": down[e].numpy() for e in range(EXPERTS)}
    layout |= {f"blk.0.ffn_gate.{e}.weight": np.ones((FFN, HIDDEN), np.float32) for e in range(EXPERTS)}
    metadata = {"llama.expert_count": EXPERTS, "llama.expert_used_count": 2}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", "llama", layout, metadata=metadata)))
    assert torch.equal(checkpoint.load("model.layers.0.block_sparse_moe.experts.2.w2.weight"), down[2])


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe"])
def test_qwen_experts_and_shared_expert(tmp_path, arch):
    width = 256
    layout = plain_layout(dense_without_mlp())
    gate, down = expert_stack(1, width, HIDDEN), expert_stack(2, HIDDEN, width)
    layout |= {"blk.0.ffn_gate_exps.weight": gate.numpy(), "blk.0.ffn_up_exps.weight": gate.numpy() + 1}
    layout |= {"blk.0.ffn_down_exps.weight": down.numpy()}
    layout["blk.0.ffn_gate_inp.weight"] = np.ones((EXPERTS, HIDDEN), np.float32)
    if arch == "qwen2moe":
        layout |= {f"blk.0.ffn_{role}_shexp.weight": np.ones((512, HIDDEN), np.float32) for role in ("gate", "up")}
        layout["blk.0.ffn_down_shexp.weight"] = np.ones((HIDDEN, 512), np.float32)
        layout["blk.0.ffn_gate_inp_shexp.weight"] = np.arange(HIDDEN, dtype=np.float32)
    metadata = {f"{arch}.expert_count": EXPERTS, f"{arch}.expert_used_count": 2}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arch, layout, metadata=metadata)))
    prefix, config = "model.layers.0.mlp.", checkpoint.config
    assert torch.equal(checkpoint.load(f"{prefix}experts.1.gate_proj.weight"), gate[1])
    assert torch.equal(checkpoint.load(f"{prefix}experts.1.up_proj.weight"), gate[1] + 1)
    assert torch.equal(checkpoint.load(f"{prefix}experts.2.down_proj.weight"), down[2])
    assert checkpoint.tensors[f"{prefix}gate.weight"].shape == (EXPERTS, HIDDEN)
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (
        EXPERTS,
        2,
        width,
    )
    assert config["norm_topk_prob"] is (arch == "qwen3moe")
    if arch == "qwen2moe":
        assert checkpoint.load(f"{prefix}shared_expert_gate.weight").tolist() == [list(range(HIDDEN))]
        assert checkpoint.tensors[f"{prefix}shared_expert.down_proj.weight"].shape == (HIDDEN, 512)
        assert config["shared_expert_intermediate_size"] == 512


def test_unknown_tensors_keep_their_names_and_are_listed(tmp_path):
    layout = llama_layout(state_dict(1)) | {"blk.0.nextn.eh_proj.weight": np.ones((2, 256), np.float32)}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", "llama", layout)))
    assert checkpoint.load("blk.0.nextn.eh_proj.weight").shape == (2, 256)
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.load("lm_head.weight")


def test_a_scale_of_a_whole_matrix_is_not_overlooked(tmp_path):
    layout = llama_layout(state_dict(1)) | {"blk.0.attn_q.scale": np.ones(1, np.float32)}
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.scale"):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", "llama", layout)))


def test_unknown_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", llama_layout(state_dict(1)))
    with pytest.raises(UnsupportedError, match="'mamba'"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", "llama", llama_layout(state_dict(1)))
    return path.read_bytes()


def refusal(path) -> str:
    with pytest.raises((CheckpointError, UnsupportedError)) as error:
        open_checkpoint(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_c37_truncated_file_tells_both_sizes(tmp_path, whole):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:-5000])
    message = refusal(path)
    assert str(len(whole) - 5000) in message
    described = int(message.split("describes ")[1].split()[0])
    assert len(whole) - 32 < described <= len(whole)  # the writer pads the end


@pytest.mark.parametrize("size", [0, 3, 4, 20, 60, 300])
def test_c37_truncated_in_the_header(tmp_path, whole, size):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:size])
    refusal(path)


@settings(max_examples=80, deadline=None)
@given(position=st.integers(4, 700), value=st.integers(0, 255))
def test_one_wrong_byte_in_the_header_is_read_or_refused_in_one_line(tmp_path_factory, whole, position, value):
    damaged = bytearray(whole)
    damaged[position] = value
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(damaged)
    try:
        open_checkpoint(str(path))
    except (CheckpointError, UnsupportedError):
        refusal(path)


def test_big_endian_split_and_pointer_files_are_recognized(tmp_path, whole):
    swapped = tmp_path / "be.gguf"
    swapped.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + whole[8:])
    assert "big-endian" in refusal(swapped)
    part = write_gguf(tmp_path / "p.gguf", "llama", llama_layout(state_dict(1)), metadata={"split.count": 2})
    assert "llama-gguf-split" in refusal(part)
    pointer = tmp_path / "lfs.gguf"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(pointer)


STRANGE = "x\n\x1b[31m" + "y" * 100_000


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight\0", "a\x1b[2J", "a\nb", "n" * 65, "层" * 22, STRANGE])
def test_names_of_tensors_that_no_reader_could_show_or_hold_are_damage(tmp_path, name):
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_layout(state_dict(1)) | {name: np.zeros(4)})
    message = refusal(path)
    assert message.isprintable()
    assert len(message) < 400
    assert "holds control characters" in message or f"has {len(name.encode('utf-8'))} bytes, more than 64" in message


def test_a_tensor_name_of_64_bytes_is_in_the_format(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_layout(state_dict(1)) | {"n" * 64: np.zeros(4)})
    assert "n" * 64 in open_checkpoint(str(path)).tensors


@pytest.mark.parametrize(
    ("arch", "metadata"),
    [
        ("llama", {"a\x1b[31m": 1}),
        ("llama", {"k" * 65536: 1}),
        (STRANGE, {}),
        ("llama", {"llama.attention.key_length": STRANGE}),
        ("llama", {"llama.rope.scaling.type": STRANGE}),
        ("llama", {"tokenizer.ggml.bos_token_id": STRANGE}),
        ("llama", {"general.alignment": STRANGE}),
    ],
)
def test_strange_metadata_is_refused_in_one_short_line(tmp_path, arch, metadata):
    message = refusal(write_gguf(tmp_path / "m.gguf", arch, llama_layout(state_dict(1)), metadata=metadata))
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize("name", ["n" * 64, "a\0b", "a\nb", "层" * 22])
def test_names_that_llama_cpp_would_refuse_or_cut_are_not_written(tmp_path, name):
    """ggml refuses a name of GGML_MAX_NAME = 64 bytes, and ends it at a NUL."""
    path = tmp_path / "m.gguf"
    with pytest.raises(UnsupportedError, match="GGUF cannot hold"):
        GgufWriter(path, {}, [TensorEntry(name, Kind.F32, (4,))])
    with pytest.raises(UnsupportedError, match="which GGUF cannot hold"):
        GgufWriter(path, {f"{name}\n": 1}, [])
    assert not path.exists()


def test_names_as_long_as_llama_cpp_takes_them_are_written(tmp_path):
    path, entry = tmp_path / "m.gguf", TensorEntry("n" * 63, Kind.F32, (4,))
    with GgufWriter(path, {"general.name": "\udce8\udcb5\udc84"}, [entry]) as writer:  # 资, read in a C locale
        writer.append(entry, [torch.arange(4.0)])
        writer.finish()
    reader = gguf.GGUFReader(path)
    assert reader.tensors[0].name == "n" * 63
    assert reader.tensors[0].data.tolist() == [0, 1, 2, 3]
    assert reader.fields["general.name"].contents() == "资"


def test_folders_with_gguf_files(tmp_path, whole):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "one.gguf").write_bytes(whole)
    assert open_checkpoint(str(folder)).path == folder / "one.gguf"
    (folder / "two.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(one\.gguf, two\.gguf\)"):
        open_checkpoint(str(folder))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"pass .*one\.gguf itself"):
        open_checkpoint(str(folder))


def test_file_without_the_ending_is_known_by_its_first_bytes(tmp_path, whole):
    (tmp_path / "blob").write_bytes(whole)
    assert open_checkpoint(str(tmp_path / "blob")).config["model_type"] == "llama"


def test_fingerprint_sees_metadata_and_data(tmp_path, whole):
    (tmp_path / "a.gguf").write_bytes(whole)
    base = open_checkpoint(str(tmp_path / "a.gguf")).fingerprint()
    (tmp_path / "a.gguf").write_bytes(whole[:-40] + b"\x01" + whole[-39:])
    assert open_checkpoint(str(tmp_path / "a.gguf")).fingerprint() != base
    layout = llama_layout(state_dict(1))
    write_gguf(tmp_path / "a.gguf", "llama", layout, metadata={"llama.rope.freq_base": 2e4})
    assert open_checkpoint(str(tmp_path / "a.gguf")).fingerprint() != base
