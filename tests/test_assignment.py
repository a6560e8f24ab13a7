"""Rules against architecture maps: groups that misfit, patterns that miss, fusion groups, routers."""

from dataclasses import replace

import pytest

from cann_llm_quant.assignment import assign
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.arch import Arch, Layer, LinearSpec, Rope
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.recipe import Recipe, Rule, WeightScheme


def make_arch(hidden: int = 64, intermediate: int = 176) -> Arch:
    """Two dense layers, written out by hand."""

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        linears = [LinearSpec(r, f"{prefix}self_attn.{r}_proj", hidden, hidden) for r in ("q", "k", "v", "o")]
        linears += [LinearSpec(r, f"{prefix}mlp.{r}_proj", intermediate, hidden) for r in ("gate", "up")]
        linears += [LinearSpec("down", f"{prefix}mlp.down_proj", hidden, intermediate)]
        return Layer(index, tuple(linears), (), (), (("q", "k", "v"), ("gate", "up")))

    return Arch("llama", 100, hidden, 4, 4, 16, intermediate, 128, 1e-5, Rope(), (layer(0), layer(1)))


def test_c01_explicit_group_that_misfits_is_refused_with_what_fits() -> None:
    with pytest.raises(UsageError) as caught:
        assign(make_arch(hidden=128), Recipe(scheme=WeightScheme(group_size=128)))
    message = str(caught.value)
    assert "model.layers.0.mlp.down_proj has 176 input features" in message
    assert "16" in message
    assert "--on-misfit" in message


def test_c01_smaller_and_skip_are_choices_made_per_layer() -> None:
    recipe = Recipe(scheme=WeightScheme(group_size=128), on_misfit="smaller")
    smaller = assign(make_arch(hidden=128), recipe)
    assert smaller.schemes["model.layers.0.mlp.down_proj"].group_size == 16
    assert smaller.schemes["model.layers.0.self_attn.q_proj"].group_size == 128
    skipped = assign(make_arch(hidden=128), recipe.model_copy(update={"on_misfit": "skip"}))
    assert "model.layers.0.mlp.down_proj" not in skipped.schemes
    assert "176" in skipped.kept["model.layers.0.mlp.down_proj"]


def test_auto_group_takes_the_largest_that_fits_each_linear() -> None:
    schemes = assign(make_arch(), Recipe()).schemes
    assert schemes["model.layers.1.self_attn.o_proj"].group_size == 64
    assert schemes["model.layers.1.mlp.down_proj"].group_size == 16


def test_c02_minus_one_is_per_channel() -> None:
    schemes = assign(make_arch(), Recipe(scheme=WeightScheme(group_size=-1))).schemes
    assert {(s.strategy, s.group_size) for s in schemes.values()} == {("channel", None)}


def test_c54_pattern_without_a_match_is_refused_unless_allowed() -> None:
    recipe = Recipe(rules=(Rule(match=("re:.*lm_hed",), scheme="skip"),))
    with pytest.raises(UsageError, match="matches none of the 15 linears"):
        assign(make_arch(), recipe)
    assert assign(make_arch(), recipe, allow_empty_pattern=True).pattern_hits == {"re:.*lm_hed": 0}


def test_c54_hits_are_counted() -> None:
    recipe = Recipe(rules=(Rule(match=("lm_head", r"re:.*\.mlp\.down_proj"), scheme="skip"),))
    result = assign(make_arch(), recipe)
    assert result.pattern_hits == {"lm_head": 1, r"re:.*\.mlp\.down_proj": 2}
    assert result.kept["model.layers.1.mlp.down_proj"] == "skipped by a rule"


def test_c23_skipping_one_member_skips_its_fusion_group() -> None:
    recipe = Recipe(rules=(Rule(match=("re:.*k_proj",), scheme="skip"),))
    result = assign(make_arch(), recipe)
    assert not [m for m in result.schemes if m.split(".")[-1] in ("q_proj", "k_proj", "v_proj")]
    assert len(result.warnings) == 2
    split = assign(make_arch(), recipe.model_copy(update={"expand_fusion_groups": False}))
    assert "model.layers.0.self_attn.q_proj" in split.schemes
    assert "cannot load" in split.warnings[0]


def test_c51_routers_are_never_quantized_and_say_why() -> None:
    arch = make_arch()
    router = LinearSpec("router", "model.layers.0.mlp.gate", 8, 64, quantizable=False)
    layers = (replace(arch.layers[0], linears=(*arch.layers[0].linears, router)), arch.layers[1])
    result = assign(replace(arch, layers=layers), Recipe())
    assert "model.layers.0.mlp.gate" not in result.schemes
    assert result.kept["model.layers.0.mlp.gate"] == "router or gate"


def test_c01_tensor_parallel_parts_must_hold_whole_groups() -> None:
    arch = make_arch(hidden=512, intermediate=27392)
    recipe = Recipe(scheme=WeightScheme(group_size=128))
    (warning,) = assign(arch, recipe, tensor_parallel=4).warnings
    assert "2 linears" in warning
    assert "model.layers.0.mlp.down_proj (27392 columns, groups of 128)" in warning
    fine = Recipe(scheme=WeightScheme(group_size=64))
    assert assign(arch, fine, tensor_parallel=4).warnings == ()


def test_rules_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to quantize"):
        assign(make_arch(), Recipe(rules=(Rule(match=("glob:*",), scheme="skip"),)))


def test_c21_rules_for_the_head_are_refused_but_wide_patterns_pass_over_it() -> None:
    with pytest.raises(UsageError, match=r"lm_head, which rules cannot \(output head; see --head-bits\)"):
        assign(make_arch(), Recipe(rules=(Rule(match=("lm_head",), scheme=WeightScheme(bits=8)),)))
    assert assign(make_arch(), Recipe(rules=(Rule(match=("glob:*",), scheme=WeightScheme(bits=8)),))).schemes


def test_auto_falls_back_to_whole_rows_and_says_so() -> None:
    result = assign(make_arch(intermediate=172), Recipe())
    assert result.schemes["model.layers.0.mlp.down_proj"].strategy == "channel"
    assert "no group size fits 2 linears" in result.warnings[0]


def test_asymmetric_linears_share_one_automatic_group_size() -> None:
    recipe = Recipe(scheme=WeightScheme(symmetric=False))
    result = assign(make_arch(hidden=192, intermediate=256), recipe)
    assert {scheme.group_size for scheme in result.schemes.values()} == {64}
    assert result.warnings == ()
    mixed = recipe.model_copy(update={"rules": (Rule(match=("glob:*.down_proj",), scheme=WeightScheme(bits=8)),)})
    assert "transformers 5.24 cannot load" in assign(make_arch(), mixed).warnings[-1]


def test_experts_share_one_automatic_group_size_and_differing_ones_are_warned_of() -> None:
    arch = make_arch(hidden=128)
    linears = [LinearSpec("experts.0.gate", "model.layers.0.mlp.experts.0.gate_proj", 96, 128)]
    linears += [LinearSpec("experts.0.down", "model.layers.0.mlp.experts.0.down_proj", 128, 96)]
    layer = replace(arch.layers[0], linears=(*arch.layers[0].linears, *linears))
    arch = replace(arch, layers=(layer, arch.layers[1]))
    schemes = assign(arch, Recipe()).schemes
    assert [schemes[spec.module].group_size for spec in linears] == [32, 32]
    assert schemes["model.layers.0.self_attn.q_proj"].group_size == 128
    skip = Recipe(rules=(Rule(match=("glob:*.experts.0.down_proj",), scheme="skip"),))
    assert "1 of 2 experts' linears stay in float" in assign(arch, skip).warnings[-1]


INT8 = WeightScheme(bits=8, group_size=-1)


def test_head_and_embedding_are_quantized_only_when_asked() -> None:
    head, embedding = "lm_head", "model.embed_tokens"
    plain = assign(make_arch(), Recipe())
    assert plain.kept[head] == "output head"
    assert plain.tables == {}
    assert embedding not in plain.schemes
    both = assign(make_arch(), Recipe(head=WeightScheme(bits=4), embedding=INT8))
    assert both.schemes[head] == Scheme("int4", True, "group", 64)
    assert both.schemes[embedding] == Scheme("int8", True, "channel", None)
    assert both.tables == {embedding: (embedding,)}
    assert not {head, embedding} & both.kept.keys()
    assert any("transformers 5.24 loads it" in warning for warning in both.warnings)


def test_c21_a_tied_head_shares_the_embeddings_matrix_or_is_refused() -> None:
    tied = replace(make_arch(), tied_head=True)
    for recipe in (Recipe(head=INT8), Recipe(embedding=INT8), Recipe(head=INT8, embedding=INT8)):
        found = assign(tied, recipe)
        assert found.tables == {"model.embed_tokens": ("model.embed_tokens", "lm_head")}
        assert "lm_head" not in found.schemes
        assert "lm_head" not in found.kept
        assert any("one int8 matrix serves both" in warning for warning in found.warnings)
    with pytest.raises(UsageError, match=r"lm_head is tied to model\.embed_tokens.*--head-bits 8"):
        assign(tied, Recipe(head=WeightScheme(bits=4)))
    assert assign(tied, Recipe()).kept["lm_head"] == "output head"


def test_c22_rules_may_skip_a_head_but_not_give_it_a_scheme() -> None:
    skip = Rule(match=("lm_head",), scheme="skip")
    assert assign(make_arch(), Recipe(head=INT8, rules=(skip,))).kept["lm_head"] == "skipped by a rule"
    wider = Rule(match=("lm_head",), scheme=WeightScheme(bits=4))
    with pytest.raises(UsageError, match=r"lm_head.*--head-bits"):
        assign(make_arch(), Recipe(head=INT8, rules=(wider,)))
    everything = Rule(match=("glob:*",), scheme=WeightScheme(bits=8, group_size=16))
    assert assign(make_arch(), Recipe(head=INT8, rules=(everything,))).schemes["lm_head"].group_size is None
