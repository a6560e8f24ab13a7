"""The architecture map: sizes from tensors, contradictions refused, sites and producers that tell the truth."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, edit_config, load_ours, random_ids, reference_logits, save_family
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.models import arch_from_checkpoint, arch_from_config, unclaimed
from cann_llm_quant.models.arch import Arch, Producer
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderModel, DenseLinear, LinearOp
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer

# case C32: heads of their own size, so that q is wider than the hidden size
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PROJECTIONS = {
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (172, 64),
    "mlp.up_proj": (172, 64),
    "mlp.down_proj": (64, 172),
}
ATTENTION_BIASES = {f"self_attn.{x}_proj.bias": (n,) for x, n in {"q": 128, "k": 64, "v": 64, "o": 64}.items()}


def llama_shapes(biases: dict[str, tuple[int, ...]] | None = None) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (96, 64),
        "model.embed_tokens.weight": (96, 64),
        "model.norm.weight": (64,),
    }
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in PROJECTIONS.items()}
        shapes |= {f"{prefix}{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        shapes |= {prefix + name: shape for name, shape in (biases or {}).items()}
    return shapes


def read(config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> Arch:
    return arch_from_config(config, llama_shapes() if shapes is None else shapes, "m")


def refused(config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(config, shapes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_c32_explicit_head_dim() -> None:
    arch = read(LLAMA)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (4, 2, 32)
    assert arch.tensor_shapes() == llama_shapes()
    assert (arch.vocab_size, arch.hidden_size, arch.intermediate_size, arch.max_positions) == (96, 64, 172, 512)


def test_c36_absent_sizes_come_from_the_tensors() -> None:
    sizes = ("num_key_value_heads", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    for gone in (*[(name,) for name in sizes], ("head_dim",), ("num_attention_heads",), sizes):
        assert read({k: v for k, v in LLAMA.items() if k not in gone}) == read(LLAMA), gone
    nulls = LLAMA | {"num_key_value_heads": None, "head_dim": None}
    assert read(nulls) == read(LLAMA)


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        ("head_dim", 16, ["16", "64", "128"]),
        ("num_attention_heads", 8, ["8", "256", "128"]),
        ("num_key_value_heads", 4, ["4", "128", "64"]),
        ("hidden_size", 60, ["60", "64"]),
        ("intermediate_size", 176, ["176", "172"]),
        ("vocab_size", 95, ["95", "96"]),
        ("num_hidden_layers", 3, ["9 of 30", "model.layers.2.self_attn.q_proj.weight", "5 more"]),
    ],
)
def test_c32_contradictions_name_field_tensor_and_both_numbers(field: str, value: int, numbers: list[str]) -> None:
    message = refused(LLAMA | {field: value})
    assert all(number in message for number in numbers), message
    assert field in message or field == "num_hidden_layers"


def test_an_absurd_count_is_refused_before_a_map_of_that_size_is_built() -> None:
    assert "num_hidden_layers=1000000000" in refused(LLAMA | {"num_hidden_layers": 10**9})


def test_rows_that_no_head_count_divides() -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")}
    assert "128 rows" in refused(config | {"num_attention_heads": 3})
    shapes = llama_shapes() | {f"model.layers.{i}.self_attn.{x}_proj.weight": (96, 64) for i in (0, 1) for x in "kv"}
    assert "num_key_value_heads=3" in refused({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, shapes)


def test_a_wrong_shape_in_a_later_layer() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    message = refused(LLAMA, llama_shapes() | {name: (64, 171)})
    assert name in message
    assert "[64, 171]" in message
    assert "[64, 172]" in message


@pytest.mark.parametrize(
    "gone",
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"],
)
def test_missing_tensors_are_listed(gone: str) -> None:
    assert gone in refused(LLAMA, {k: v for k, v in llama_shapes().items() if k != gone})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"model_type": None}, "model_type"),
        ({"max_position_embeddings": 10.5}, "max_position_embeddings"),
    ],
)
def test_fields_of_a_wrong_type(change: dict[str, Any], word: str) -> None:
    assert word in refused(LLAMA | change)


def test_whole_numbers_written_as_floats_are_read() -> None:
    assert read(LLAMA | {"hidden_size": 64.0}) == read(LLAMA)


def test_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(LLAMA | {"model_type": "llamma"})
    assert "'llamma'" in str(caught.value)
    assert all(family in str(caught.value) for family in FAMILIES)


def test_biases_exist_where_the_file_has_them() -> None:
    with_biases = llama_shapes(ATTENTION_BIASES)
    for config in (LLAMA, LLAMA | {"attention_bias": True}):
        arch = read(config, with_biases)
        assert arch.tensor_shapes() == with_biases
        assert arch.layers[0].linear("o").bias
        assert not arch.layers[0].linear("down").bias
    message = refused(LLAMA | {"attention_bias": False}, with_biases)
    assert "q_proj.bias" in message
    assert "attention_bias" in message
    assert "self_attn.q_proj.bias" in refused(LLAMA | {"attention_bias": True})
    assert "mlp.gate_proj.bias" in refused(LLAMA | {"mlp_bias": True})


def test_a_family_with_fixed_biases_contradicts_the_file() -> None:
    assert "self_attn.q_proj.bias" in refused(LLAMA | {"model_type": "qwen2"})
    message = refused(LLAMA | {"model_type": "mistral"}, llama_shapes(ATTENTION_BIASES))
    assert "self_attn.q_proj.bias" in message


def test_c21_silent_config_with_and_without_a_head() -> None:
    silent = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    headless = {k: v for k, v in llama_shapes().items() if k != "lm_head.weight"}
    assert not read(silent).tied_head
    assert read(silent, headless).tied_head
    assert "lm_head.weight" not in read(LLAMA | {"tie_word_embeddings": True}).tensor_shapes()


def test_c29_unclaimed_tensors_are_listed_and_no_error() -> None:
    extra = {"model.mtp.0.proj.weight": (64, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    shapes = extra | llama_shapes()
    assert unclaimed(read(LLAMA, shapes), shapes) == list(extra)
    tied = read(LLAMA | {"tie_word_embeddings": True}, shapes)
    assert unclaimed(tied, shapes) == [*extra, "lm_head.weight"]


def test_expert_counts_are_checked(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        config, shapes = checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()}
    config = {k: v for k, v in config.items() if k not in ("num_experts", "num_local_experts")}
    assert (
        read(config, shapes)
        == read(config | {"num_experts": 5}, shapes)
        == read(config | {"num_local_experts": 5}, shapes)
    )
    assert "num_experts=6" in refused(config | {"num_experts": 6}, shapes)
    assert "contradicts" in refused(config | {"num_experts": 5, "num_local_experts": 6}, shapes)
    assert "num_experts_per_tok=9" in refused(config | {"num_experts_per_tok": 9}, shapes)
    assert "moe_intermediate_size=30" in refused(config | {"moe_intermediate_size": 30}, shapes)
    assert "num_experts_per_tok" in refused({k: v for k, v in config.items() if k != "num_experts_per_tok"}, shapes)


def scaled_by_smooth_pairs(arch: Arch, tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """Divide each site's input by random factors through its producer, and multiply the columns that read it."""
    generator, layer, scaled = torch.Generator().manual_seed(index), arch.layers[index], dict(tensors)
    for site in layer.sites:
        producer, readers = site.producer, [layer.linear(role) for role in site.linears]
        if producer is None:
            continue
        width = readers[0].in_features // producer.repeat
        by_row = torch.rand(width, generator=generator) * 3 + 0.3
        if producer.kind == "norm":
            name = next(p.name for p in layer.parameters if p.role == producer.role)
            scaled[name] = scaled[name] / by_row
        else:
            source = layer.linear(producer.role)
            scaled[f"{source.module}.weight"] = scaled[f"{source.module}.weight"] / by_row[:, None]
            if source.bias:
                scaled[f"{source.module}.bias"] = scaled[f"{source.module}.bias"] / by_row
        channels = torch.arange(readers[0].in_features)
        rows = channels // arch.head_dim // producer.repeat * arch.head_dim + channels % arch.head_dim
        by_channel = by_row if producer.repeat == 1 else by_row[rows]
        for reader in readers:
            scaled[f"{reader.module}.weight"] = scaled[f"{reader.module}.weight"] * by_channel
    return scaled


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_smooth_pairs_leave_the_function_unchanged(tmp_path: Path, family: str, biased: bool) -> None:
    """Every producer of the map really absorbs its site's scale; routers see the same bits (C51)."""
    reference = save_family(tmp_path, family, **({"attention_bias": True, "mlp_bias": True} if biased else {}))
    ids, device = random_ids(97, 2, 11), torch.device("cpu")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        outer = load_outer(checkpoint, arch, device, torch.float32)
        layers = [load_layer(checkpoint, arch, i, device, torch.float32) for i in range(arch.num_layers)]
    changed = [scaled_by_smooth_pairs(arch, tensors, i) for i, tensors in enumerate(layers)]
    for i, layer in enumerate(arch.layers):
        fixed = [spec for spec in layer.linears if not spec.quantizable]
        assert all(torch.equal(changed[i][f"{s.module}.weight"], layers[i][f"{s.module}.weight"]) for s in fixed)
    built = [build_layer(arch, i, tensors) for i, tensors in enumerate(changed)]
    model = DecoderModel(arch, built, outer.embedding, outer.norm, DenseLinear(outer.head))
    torch.testing.assert_close(model(ids), reference_logits(reference, ids), atol=2e-4, rtol=0)


def test_sites_of_a_dense_layer() -> None:
    layer = read(LLAMA).layers[1]
    assert {site.name: (site.linears, site.producer) for site in layer.sites} == {
        "qkv": (("q", "k", "v"), Producer("norm", "input_norm")),
        "o": (("o",), Producer("linear", "v", repeat=2)),
        "gate_up": (("gate", "up"), Producer("norm", "post_norm")),
        "down": (("down",), Producer("linear", "up")),
    }
    assert layer.fusion_groups == (("q", "k", "v"), ("gate", "up"))
    assert all(spec.quantizable for spec in layer.linears)


def test_c50_c51_map_of_a_layer_with_experts(tmp_path: Path) -> None:
    """Every matrix on disk has a role, each expert its own sites; router and shared gate are never quantized."""
    save_family(tmp_path, "qwen2_moe", mlp_only_layers=[0])
    with open_checkpoint(str(tmp_path)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        assert set(arch.tensor_shapes()) == set(checkpoint.tensors)
    dense, sparse = arch.layers[0], arch.layers[2]
    assert dense.moe is None
    assert [s.name for s in dense.sites] == ["qkv", "o", "gate_up", "down"]
    assert sparse.moe is not None
    assert (sparse.moe.num_experts, sparse.moe.shared_intermediate_size, sparse.moe.shared_gate) == (5, 44, True)
    assert [s.role for s in sparse.linears if not s.quantizable] == ["router", "shared_gate"]
    sites = {site.name: site for site in sparse.sites}
    assert sites["experts.3.gate_up"].linears == ("experts.3.gate", "experts.3.up")
    assert sites["experts.3.gate_up"].producer is None
    assert sites["shared.gate_up"].producer is None
    assert sites["experts.3.down"].producer == Producer("linear", "experts.3.up")
    assert sites["shared.down"].producer == Producer("linear", "shared.up")
    assert ("experts.4.gate", "experts.4.up") in sparse.fusion_groups
    read_by_sites = {role for site in sparse.sites for role in site.linears}
    assert read_by_sites == {spec.role for spec in sparse.linears if spec.quantizable}


class Spy:
    """A linear operation that notes what it is given."""

    def __init__(self, op: LinearOp, role: str, given: dict[str, Tensor]) -> None:
        self.op, self.role, self.given = op, role, given

    def __call__(self, x: Tensor) -> Tensor:
        assert self.role not in self.given
        self.given[self.role] = x
        return self.op(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_observers_get_what_the_linears_of_the_site_get(tmp_path: Path, family: str) -> None:
    save_family(tmp_path, family)
    model = load_ours(tmp_path)
    for layer in model.layers:
        given: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}

        def observe(site: str, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            assert site not in seen
            seen[site] = x

        layer.linears = {role: Spy(op, role, given) for role, op in layer.linears.items()}
        x = torch.randn(1, 3, 36, generator=torch.Generator().manual_seed(0))
        layer(x, torch.arange(3)[None], CausalAttend(), observe)
        for site in layer.layer.sites:
            for role in site.linears:
                assert (role in given) == (site.name in seen)
                if role in given:
                    assert torch.equal(seen[site.name], given[role].reshape(-1, given[role].shape[-1]))
        moe = layer.layer.moe
        if moe is not None:
            routed = [len(x) for site, x in seen.items() if site.startswith("experts.") and site.endswith("gate_up")]
            assert sum(routed) == 3 * moe.top_k
            assert min(routed) > 0


def test_c21_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    edit_config(tmp_path, tie_word_embeddings=True)
    with open_checkpoint(str(tmp_path)) as checkpoint, pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        arch_from_checkpoint(checkpoint)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'mish'.*silu"):
        read(LLAMA | {"hidden_act": "mish"})


GOOD = (
    *("config_without_dtype_and_defaults", "no_format_metadata", "old_rotary_inv_freq_buffers", "mixed_dtypes"),
    *("sharded_safetensors", "tied_with_redundant_head", "untied_head", "v4_style_config", "vocab_515_padded"),
    *("zero_biases", "zero_rows_and_dead_channels"),
)


@pytest.mark.shared
@pytest.mark.parametrize("name", GOOD)
def test_wild_layouts_compute_what_transformers_computes(shared: Path, name: str) -> None:
    folder = shared / "data" / "wild" / name
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids(512, 2, 40)
    torch.testing.assert_close(load_ours(folder)(ids), reference_logits(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad_gqa_heads", ["num_key_value_heads=3", "24", "32"]),
        ("bad_shape", ["intermediate_size=176", "172"]),
        ("bad_missing_tensor", ["1 of", "missing", "model.layers."]),
        ("bad_unknown_model_type", ["llamma", "qwen3_moe"]),
    ],
)
def test_broken_wild_layouts_are_refused(shared: Path, name: str, words: list[str]) -> None:
    with open_checkpoint(str(shared / "data" / "wild" / name)) as checkpoint:
        with pytest.raises((CheckpointError, UnsupportedError)) as caught:
            arch_from_checkpoint(checkpoint)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("tied_with_redundant_head", ["lm_head.weight"]),
        ("old_rotary_inv_freq_buffers", [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(5)]),
        ("untied_head", []),
    ],
)
def test_wild_extras_are_listed(shared: Path, name: str, extra: list[str]) -> None:
    with open_checkpoint(str(shared / "data" / "wild" / name)) as checkpoint:
        assert sorted(unclaimed(arch_from_checkpoint(checkpoint), checkpoint.tensors)) == extra
