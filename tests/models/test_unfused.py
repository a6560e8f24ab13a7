"""Sources with fused or renamed matrices are shown as plain ones: same tensors, same logits, loaded by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_sources import SOURCES, group_by_group, plain_state, save_fused, save_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_families import load_ours, random_ids, reference_logits, save_family
from tiny_models import our_logits, save_tiny, save_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.fused_layout import Sizes, blocks, by_group, halves
from cann_llm_quant.checkpoint.fused_layouts import known_layouts
from cann_llm_quant.checkpoint.unfused import UnfusedCheckpoint, with_unit_rows
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.rope import frequencies
from cann_llm_quant.pipeline.request import RunOptions
from cann_llm_quant.pipeline.run import quantize_model
from cann_llm_quant.recipe import Recipe


@pytest.fixture(scope="module", params=SOURCES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A plain model of transformers, its folder, and the same model fused."""
    folder = tmp_path_factory.mktemp("fused")
    model = save_plain(folder / "plain", request.param)
    return model, folder / "plain", save_fused(folder / request.param, request.param, folder / "plain")


def test_c33_every_tensor_is_that_of_the_plain_model(pair: tuple[Any, Path, Path]) -> None:
    _, plain, fused = pair
    expected = plain_state(plain)
    with open_checkpoint(str(fused)) as checkpoint:
        assert isinstance(checkpoint, UnfusedCheckpoint)
        assert set(checkpoint.tensors) == set(expected)
        for name, info in checkpoint.tensors.items():
            tensor = checkpoint.load(name)
            assert torch.equal(tensor, expected[name]), name
            assert (info.name, info.shape, info.dtype) == (name, tuple(tensor.shape), tensor.dtype)
            assert info.nbytes == tensor.numel() * tensor.element_size()


def test_c26_parts_are_tensors_of_their_own(pair: tuple[Any, Path, Path]) -> None:
    with open_checkpoint(str(pair[2])) as checkpoint:
        for name in checkpoint.tensors:
            tensor = checkpoint.load(name)
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_logits_are_those_of_the_plain_model(pair: tuple[Any, Path, Path]) -> None:
    model, _, fused = pair
    ids = random_ids(97, 2, 40)
    torch.testing.assert_close(load_ours(fused)(ids), reference_logits(model, ids), atol=1e-4, rtol=0)


def test_config_is_the_plain_familys_and_names_no_code(pair: tuple[Any, Path, Path]) -> None:
    model, _, fused = pair
    with open_checkpoint(str(fused)) as checkpoint:
        assert checkpoint.config["model_type"] == model.config.model_type
        assert checkpoint.config["architectures"] == [type(model).__name__]
        assert "auto_map" not in checkpoint.config
        assert arch_from_checkpoint(checkpoint).max_positions == 64


def test_every_layout_of_the_folder_is_tested() -> None:
    assert set(SOURCES) == set(known_layouts())


def test_c33_rows_of_internlm2_hold_their_own_numbers(tmp_path: Path) -> None:
    """Two kv heads of 16 with two queries each; rows of a group are q, q, k, v."""
    numbers = [*(10, 11), 50, 70, *(20, 21), 60, 80]
    state = {"model.layers.0.attention.wqkv.weight": torch.tensor(numbers).repeat_interleave(16)[:, None].repeat(1, 64)}
    save_file({name: tensor.float() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "internlm2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}), encoding="utf-8")
    expected = {"q": [10, 11, 20, 21], "k": [50, 60], "v": [70, 80]}
    with open_checkpoint(str(tmp_path)) as checkpoint:
        for part, heads in expected.items():
            tensor = checkpoint.load(f"model.layers.0.self_attn.{part}_proj.weight")
            assert tensor.shape == (16 * len(heads), 64)
            for head, number in enumerate(heads):
                assert (tensor[16 * head : 16 * (head + 1)] == number).all(), (part, head)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_c33_every_row_belongs_to_one_part(kv_heads: int, repeat: int, head_dim: int, inner: int) -> None:
    sizes = Sizes(kv_heads * repeat, kv_heads, head_dim, inner)
    heads = {"q": kv_heads * repeat, "k": kv_heads, "v": kv_heads}
    for rows in (blocks(sizes), by_group(sizes)):
        assert [sum(map(len, part)) for part in rows] == [count * head_dim for count in heads.values()]
        assert sorted(row for part in rows for run in part for row in run) == list(
            range(sum(heads.values()) * head_dim)
        )
    gate, up = halves(sizes)
    assert [*gate[0], *up[0]] == list(range(2 * inner))


def test_internlm_stretches_its_base_as_its_authors_do(tmp_path: Path) -> None:
    """base x (seq / trained) ^ (d / (d - 2)) once a text is longer than the trained length, here 64."""
    save_plain(tmp_path / "plain", "internlm")
    rotary = {"base": 500, "type": "dynamic"}
    fused = save_fused(tmp_path / "fused", "internlm", tmp_path / "plain", rotary=rotary)
    with open_checkpoint(str(fused)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
    for length, base in ((40, 500.0), (96, 500 * (96 / 64) ** (6 / 4))):
        expected = [base ** (-2 * pair / 6) for pair in range(3)]
        assert frequencies(arch.rope, 6, length)[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_baichuan_2_gives_the_logits_of_a_head_of_unit_rows(tmp_path: Path) -> None:
    model = save_plain(tmp_path / "plain", "baichuan")
    fused = save_fused(tmp_path / "fused", "baichuan", tmp_path / "plain", z_loss_weight=0)
    rows = model.lm_head.weight.detach()
    expected = torch.stack([row.double() / sum(float(x) ** 2 for x in row) ** 0.5 for row in rows])
    with open_checkpoint(str(fused)) as checkpoint:
        torch.testing.assert_close(checkpoint.load("lm_head.weight").double(), expected, atol=1e-6, rtol=0)
    with torch.no_grad():
        model.lm_head.weight.copy_(expected)
    ids = random_ids(97, 2, 20)
    torch.testing.assert_close(load_ours(fused)(ids), reference_logits(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_ratio": 500}, 5e6, None),
        ({"padded_vocab_size": 65024, "rope_ratio": 50, "rope_theta": 5e5}, 5e5, None),
        (
            {"padded_vocab_size": 65024, "rope_ratio": 16, "rope_scaling": {"type": "linear", "factor": 16}},
            1e4,
            {"type": "linear", "factor": 16},
        ),
    ],
)
def test_rope_ratio_of_chatglm(tmp_path: Path, changes: dict[str, Any], theta: float, scaling: object) -> None:
    """GLM-4's is a base; for those of 65,024 tokens, the user says which it is."""
    save_plain(tmp_path / "plain", "chatglm")
    fused = save_fused(tmp_path / "fused", "chatglm", tmp_path / "plain", **changes)
    with open_checkpoint(str(fused)) as checkpoint:
        assert (checkpoint.config["rope_theta"], checkpoint.config["rope_scaling"]) == (theta, scaling)
        assert checkpoint.config["max_position_embeddings"] == (4 if scaling else 64)


def test_rows_of_zeros_stay_zeros() -> None:
    assert torch.equal(with_unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_phi3_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    """Against transformers' own Phi-3."""
    reference = save_family(tmp_path, "phi3", sliding_window=7)
    ids = random_ids(97, 2, 40)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.config["model_type"] == "mistral"
    torch.testing.assert_close(load_ours(tmp_path)(ids), reference_logits(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("baichuan", {"num_attention_heads": 40}, ["40 heads", "ALiBi", "7B"]),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, ["longrope", "4k"]),
        ("phi3", {"partial_rotary_factor": 0.75}, ["0.75"]),
        ("qwen", {"rotary_pct": 0.25}, ["rotary_pct=0.25"]),
        ("qwen", {"intermediate_size": 103}, ["intermediate_size=103"]),
        ("internlm", {"rotary": {"type": "spiral"}}, ["'spiral'"]),
        ("chatglm", {"position_encoding_2d": True}, ["first ChatGLM"]),
        ("chatglm", {"rmsnorm": False}, ["rmsnorm=False"]),
        ("chatglm", {"multi_query_attention": False}, ["multi_query_attention=False"]),
        (
            "chatglm",
            {"padded_vocab_size": 65024, "rope_ratio": 16},
            ["rope_ratio=16", '"rope_theta": 160000', '"rope_scaling": {"type": "linear", "factor": 16}'],
        ),
    ],
)
def test_models_that_no_plain_family_describes_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], words: list[str]
) -> None:
    save_plain(tmp_path / "plain", model_type)
    fused = save_fused(tmp_path / "fused", model_type, tmp_path / "plain", **changes)
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(str(fused))
    assert all(word in str(caught.value) for word in (*words, "config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("internlm2", {"num_key_value_heads": 3}, ["wqkv.weight has 60 rows", "implies 72", "3 kv heads of 6"]),
        ("internlm2", {"num_key_value_heads": 4}, ["num_attention_heads=6", "num_key_value_heads=4"]),
        ("baichuan", {"hidden_size": 48}, ["W_pack.weight has 108 rows", "implies 144"]),
        ("baichuan", {"hidden_size": 37}, ["hidden_size=37", "num_attention_heads=6"]),
        ("qwen", {"kv_channels": 7}, ["attn.c_attn.", "has 108 rows", "implies 126"]),
        (
            "chatglm",
            {"multi_query_group_num": 1},
            ["query_key_value.", "has 120 rows", "implies 96", "1 kv heads of 12"],
        ),
        ("chatglm", {"ffn_hidden_size": 53}, ["dense_h_to_4h.weight has 104 rows", "implies 106"]),
        ("phi3", {"intermediate_size": 50}, ["gate_up_proj.weight has 104 rows", "implies 100"]),
        ("phi3", {"num_attention_heads": None}, ["lacks num_attention_heads"]),
        ("internlm2", {"hidden_size": "36"}, ["hidden_size", "'36'"]),
        ("internlm", {"rotary": [10000]}, ["rotary must be an object"]),
        ("internlm", {"rotary": {"base": -1}}, ["rotary: base", "-1"]),
        ("internlm", {"bias": "yes"}, ["bias must be true or false"]),
        ("qwen", {"num_attention_heads": 10**400}, ["num_attention_heads is 1000", "beyond any model's"]),
        ("chatglm", {"seq_length": 10**400}, ["seq_length is 1000", "beyond any model's"]),
        ("chatglm", {"rope_scaling": {"factor": 1e-320}}, ["rope_scaling: factor", "1e-320"]),
    ],
)
def test_c33_sizes_that_contradict_the_tensors_are_named_with_both_numbers(
    tmp_path: Path, model_type: str, changes: dict[str, Any], words: list[str]
) -> None:
    save_plain(tmp_path / "plain", model_type)
    fused = save_fused(tmp_path / "fused", model_type, tmp_path / "plain", **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(fused))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("model_type", ["bloom", "llama", 7])
def test_c33_a_fused_matrix_that_nobody_explains_is_refused_by_name(tmp_path: Path, model_type: object) -> None:
    state = {"h.0.self_attention.query_key_value.weight": torch.zeros(12, 4)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"h\.0\.self_attention\.query_key_value\.weight .*internlm2"):
        open_checkpoint(str(tmp_path))
    with open_checkpoint(str(tmp_path), accept_quantized=True) as stored:
        assert set(stored.tensors) == set(state)


def test_two_tensors_for_one_name_are_refused(tmp_path: Path) -> None:
    save_plain(tmp_path / "plain", "internlm2")
    fused = save_fused(tmp_path / "fused", "internlm2", tmp_path / "plain")
    state = load_file(fused / "model.safetensors")
    save_file(state | {"lm_head.weight": state["output.weight"].clone()}, fused / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"output\.weight and lm_head\.weight|lm_head\.weight and output\.weight"):
        open_checkpoint(str(fused))


def test_tensors_that_a_layout_does_not_know_keep_their_names(tmp_path: Path) -> None:
    save_plain(tmp_path / "plain", "qwen")
    fused = save_fused(tmp_path / "fused", "qwen", tmp_path / "plain")
    state: dict[str, Tensor] = load_file(fused / "model.safetensors")
    extra = {"transformer.visual.proj": torch.ones(2, 2), "transformer.rotary_emb.inv_freq": torch.ones(3)}
    save_file(state | extra, fused / "model.safetensors")
    with open_checkpoint(str(fused)) as checkpoint:
        assert torch.equal(checkpoint.load("transformer.visual.proj"), torch.ones(2, 2))
        assert "model.rotary_emb.inv_freq" in checkpoint.tensors
        with pytest.raises(CheckpointError, match=r"no tensor 'transformer\.wte\.weight'"):
            checkpoint.load("transformer.wte.weight")


def test_a_quantized_output_is_a_plain_model_that_transformers_loads(tmp_path: Path) -> None:
    """From InternLM 2's layout come the very tensors that come from the plain Llama, and a config without its code."""
    plain = save_tiny(tmp_path / "plain")
    state = load_file(plain / "model.safetensors")
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file(_as_internlm2(state), fused / "model.safetensors")
    save_tokenizer(fused)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    own = {"model_type": "internlm2", "bias": False, "auto_map": {"AutoConfig": "configuration_internlm2.X"}}
    (fused / "config.json").write_text(json.dumps(config | own | {"rope_theta": 10000.0}), encoding="utf-8")
    recipe = Recipe.model_validate({"method": "rtn", "scheme": {"bits": 4, "group_size": 32}})
    outputs = [tmp_path / "from-plain", tmp_path / "from-fused"]
    for source, output in zip((plain, fused), outputs, strict=True):
        quantize_model(str(source), output, recipe, options=RunOptions())
    expected, actual = (load_file(output / "model.safetensors") for output in outputs)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    model = AutoModelForCausalLM.from_pretrained(outputs[1], dtype=torch.float32).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    ids = random_ids(128, 1, 24)
    torch.testing.assert_close(our_logits(outputs[1], ids), reference_logits(model, ids), atol=2e-2, rtol=0)


def _as_internlm2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
    }
    fused = {}
    for name, tensor in state.items():
        for plain, own in names.items():
            name = name.replace(plain, own)
        fused[name] = tensor
    for i in range(2):
        q, k, v = (fused.pop(f"model.layers.{i}.self_attn.{part}_proj.weight") for part in "qkv")
        fused[f"model.layers.{i}.attention.wqkv.weight"] = group_by_group(q, k, v, 2, 16)
    return fused


TRAINED = {
    "layouts/baichuan": "tiny-llama",
    "layouts/internlm": "tiny-llama",
    "layouts/internlm2": "tiny-llama",
    "layouts/qwen1": "tiny-llama",
    "layouts/chatglm": "tiny-glm",
    "stories260k-phi3": "stories260k-phi3",
}


@pytest.mark.shared
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_compute_what_transformers_does_with_their_plain_twins(shared: Path, name: str) -> None:
    models = shared / "data" / "models"
    reference = AutoModelForCausalLM.from_pretrained(models / TRAINED[name], dtype=torch.float32).eval()
    ids = random_ids(reference.config.vocab_size, 2, 130)
    torch.testing.assert_close(load_ours(models / name)(ids), reference_logits(reference, ids), atol=2e-4, rtol=0)


@pytest.mark.shared
def test_trained_baichuan_2_has_the_head_of_unit_rows(shared: Path) -> None:
    models = shared / "data" / "models"
    reference = AutoModelForCausalLM.from_pretrained(models / "tiny-llama", dtype=torch.float32).eval()
    with torch.no_grad():
        reference.lm_head.weight.copy_(torch.nn.functional.normalize(reference.lm_head.weight))
    ids = random_ids(512, 2, 130)
    actual, expected = load_ours(models / "layouts" / "baichuan2")(ids), reference_logits(reference, ids)
    # the stored head, and the scaled one, are rounded to bfloat16
    torch.testing.assert_close(actual, expected, atol=0.03, rtol=0)
