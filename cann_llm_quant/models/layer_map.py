"""From a family's data, a config and the tensors' shapes to the map of each layer.

A `Family` says what a config cannot: the names under which roles are stored, which linears carry biases, how windows
and experts are spread over the layers. Sizes come from the tensors and are checked against the config; a bias exists
when the file has it, and a config or a family that says otherwise is contradicted with an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.models.arch import Layer, LinearSpec, Moe, ParameterSpec, Producer, Site
from cann_llm_quant.models.config_fields import ConfigFields

Shapes = Mapping[str, tuple[int, ...]]
Window = Callable[[ConfigFields, int], int | None]

ATTENTION = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
}
NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


@dataclass(frozen=True)
class BiasRule:
    """Whether linears have a bias: what `flag` of the config says, else `default`, else (None) what the file shows."""

    flag: str | None = None
    default: bool | None = None

    def expected(self, fields: ConfigFields) -> bool | None:
        """True or False when it is settled, None when the file decides."""
        said = fields.optional_flag(self.flag) if self.flag else None
        return self.default if said is None else said

    def source(self, fields: ConfigFields) -> str:
        """Who settled it, for messages."""
        return f"{self.flag} in {fields.where}" if self.flag and fields.given(self.flag) else "its model type"


NO_BIAS = BiasRule(default=False)


@dataclass(frozen=True)
class Experts:
    """Where a family keeps its experts. `{n}` in a module name is the expert's number."""

    router: str
    expert: Mapping[str, str]
    intermediate: str
    normalize: str | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    shared_gate: str | None = None
    shared_intermediate: str = "shared_expert_intermediate_size"
    sparse: Callable[[ConfigFields, int], bool] = lambda fields, index: True


def full_attention(fields: ConfigFields, index: int) -> int | None:
    """No layer has a window."""
    return None


@dataclass(frozen=True)
class Family:
    """What distinguishes one `model_type`; see the module's docstring.

    `partial_rotary`: the config's `partial_rotary_factor` may leave the last channels of every head unturned.
    `interleaved_rotary`: neighbours turn together, see `Rope`.
    """

    model_type: str
    default_theta: float = 10000.0
    default_eps: float = 1e-6
    qkv_bias: BiasRule = NO_BIAS
    o_bias: BiasRule = NO_BIAS
    mlp_bias: BiasRule = NO_BIAS
    qk_norm: bool = False
    partial_rotary: bool = False
    interleaved_rotary: bool = False
    window: Window = full_attention
    experts: Experts | None = None
    attention: Mapping[str, str] = field(default_factory=lambda: ATTENTION)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    mlp: Mapping[str, str] = field(default_factory=lambda: MLP)
    layer_prefix: str = "model.layers.{i}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"


@dataclass(frozen=True)
class Sizes:
    """The sizes that all layers share."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


class LayerBuilder:
    """Builds the map of one layer from the family's data, the config and the tensors' shapes."""

    def __init__(self, family: Family, fields: ConfigFields, shapes: Shapes, sizes: Sizes, index: int) -> None:
        self.family = family
        self.fields = fields
        self.shapes = shapes
        self.sizes = sizes
        self.index = index
        self.prefix = family.layer_prefix.format(i=index)
        self.linears: list[LinearSpec] = []
        self.sites: list[Site] = []
        self.groups: list[tuple[str, ...]] = []

    def build(self) -> Layer:
        """The layer's map. Raises CheckpointError for sizes or biases that the files contradict."""
        self._attention()
        experts = self.family.experts
        moe = None
        if experts is not None and experts.sparse(self.fields, self.index):
            moe = self._moe(experts)
        else:
            width = self._width(self.family.mlp["gate"], "intermediate_size")
            self._gated_mlp("", self.family.mlp, width, Producer("norm", "post_norm"))
        return Layer(
            index=self.index,
            linears=tuple(self.linears),
            parameters=self._parameters(),
            sites=tuple(self.sites),
            fusion_groups=tuple(self.groups),
            window=self.family.window(self.fields, self.index),
            moe=moe,
        )

    def _parameters(self) -> tuple[ParameterSpec, ...]:
        vectors = [
            ParameterSpec(role, self.prefix + name, (self.sizes.hidden,)) for role, name in self.family.norms.items()
        ]
        if self.family.qk_norm:
            vectors += [
                ParameterSpec(role, self.prefix + name, (self.sizes.head_dim,)) for role, name in QK_NORMS.items()
            ]
        return tuple(vectors)

    def _attention(self) -> None:
        size, names = self.sizes, self.family.attention
        q_width, kv_width = size.heads * size.head_dim, size.kv_heads * size.head_dim
        for role, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            self._linear(role, names[role], width, size.hidden, self.family.qkv_bias)
        self._linear("o", names["o"], size.hidden, q_width, self.family.o_bias)
        self.groups.append(("q", "k", "v"))
        self.sites.append(Site("qkv", ("q", "k", "v"), Producer("norm", "input_norm")))
        self.sites.append(Site("o", ("o",), Producer("linear", "v", size.heads // size.kv_heads)))

    def _gated_mlp(self, role_prefix: str, names: Mapping[str, str], width: int, producer: Producer | None) -> None:
        """gate, up and down under `role_prefix`; up may absorb a scale of down's input, which is act(gate) * up."""
        gate, up, down = (f"{role_prefix}{role}" for role in ("gate", "up", "down"))
        bias = self.family.mlp_bias
        self._linear(gate, names["gate"], width, self.sizes.hidden, bias)
        self._linear(up, names["up"], width, self.sizes.hidden, bias)
        self._linear(down, names["down"], self.sizes.hidden, width, bias)
        self.groups.append((gate, up))
        self.sites.append(Site(f"{role_prefix}gate_up", (gate, up), producer))
        self.sites.append(Site(f"{role_prefix}down", (down,), Producer("linear", up)))

    def _moe(self, experts: Experts) -> Moe:
        """Router, experts and the shared expert. The norm before them feeds the router too, so it absorbs nothing."""
        hidden = self.sizes.hidden
        router = f"{self.prefix}{experts.router}.weight"
        count = self.fields.size("num_experts", "num_local_experts", found=_axis(self.shapes, router, 0), source=router)
        _check_count(self.fields, "num_experts", count, self.shapes)
        top_k = self.fields.integer("num_experts_per_tok")
        if top_k > count:
            raise CheckpointError(
                f"{self.fields.where} says num_experts_per_tok={top_k}, but there are {count} experts"
            )
        width = self._width(experts.expert["gate"].format(n=0), experts.intermediate)
        self._linear("router", experts.router, count, hidden, NO_BIAS, quantizable=False)
        for n in range(count):
            names = {role: name.format(n=n) for role, name in experts.expert.items()}
            self._gated_mlp(f"experts.{n}.", names, width, None)
        shared_width = None
        if experts.shared:
            shared_width = self._width(experts.shared["gate"], experts.shared_intermediate)
            self._gated_mlp("shared.", experts.shared, shared_width, None)
        if experts.shared_gate:
            self._linear("shared_gate", experts.shared_gate, 1, hidden, NO_BIAS, quantizable=False)
        normalize = self.fields.flag(experts.normalize) if experts.normalize else True
        return Moe(count, top_k, width, normalize, shared_width, experts.shared_gate is not None)

    def _width(self, gate: str, config_name: str) -> int:
        name = f"{self.prefix}{gate}.weight"
        return self.fields.size(config_name, found=_axis(self.shapes, name, 0), source=name)

    def _linear(
        self, role: str, name: str, out: int, into: int, bias_rule: BiasRule, *, quantizable: bool = True
    ) -> None:
        module = self.prefix + name
        expected, present = bias_rule.expected(self.fields), f"{module}.bias" in self.shapes
        if present and expected is False:
            raise CheckpointError(
                f"tensor {module}.bias is in the file, but {bias_rule.source(self.fields)} says that there is none"
            )
        # an expected bias that is absent is reported with the other missing tensors
        bias = present if expected is None else expected
        self.linears.append(LinearSpec(role, module, out, into, bias, quantizable))


def shared_sizes(family: Family, fields: ConfigFields, shapes: Shapes, hidden: int) -> Sizes:
    """Head counts and head size, from the first layer's projections, checked against the config.

    Raises CheckpointError naming both numbers where they disagree.
    """
    prefix = family.layer_prefix.format(i=0)
    q, k = (f"{prefix}{family.attention[role]}.weight" for role in ("q", "k"))
    q_rows, k_rows = _axis(shapes, q, 0), _axis(shapes, k, 0)
    heads, head_dim = fields.optional_integer("num_attention_heads"), fields.optional_integer("head_dim")
    if heads is None and head_dim is None:
        raise CheckpointError(f"{fields.where} lacks num_attention_heads; add it with the model's value")
    if heads is None:
        heads = _divided(q_rows, head_dim, q, "head_dim", fields)
    elif head_dim is None:
        head_dim = _divided(q_rows, heads, q, "num_attention_heads", fields)
    assert head_dim is not None
    _check_rows(q, q_rows, fields, {"num_attention_heads": heads, "head_dim": head_dim})
    kv_heads = fields.optional_integer("num_key_value_heads")
    if kv_heads is None:
        kv_heads = _divided(k_rows, head_dim, k, "head_dim", fields)
    _check_rows(k, k_rows, fields, {"num_key_value_heads": kv_heads, "head_dim": head_dim})
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    return Sizes(hidden, heads, kv_heads, head_dim)


def check_tensors(expected: Shapes, shapes: Shapes, where: str, show: int = 4) -> None:
    """Every expected tensor is there in its shape; others are no concern.

    Raises CheckpointError naming the first missing tensors and their count, or the first wrong shape.
    """
    missing = [name for name in expected if name not in shapes]
    if missing:
        more = f" and {len(missing) - show} more" if len(missing) > show else ""
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {', '.join(missing[:show])}{more}; "
            "the download is incomplete or config.json describes another model"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(shapes[name])}, but config.json and its neighbours "
                f"imply {list(shape)}"
            )


def layer_count(family: Family, fields: ConfigFields, shapes: Shapes) -> int:
    """`num_hidden_layers`, or as many consecutive layers as the file names when the config lacks it."""
    said = fields.optional_integer("num_hidden_layers")
    if said is not None:
        _check_count(fields, "num_hidden_layers", said, shapes)
        return said
    prefix, suffix = family.layer_prefix.split("{i}")
    present = {name.removeprefix(prefix).partition(suffix)[0] for name in shapes if name.startswith(prefix)}
    count = 0
    while str(count) in present:
        count += 1
    if count == 0:
        raise CheckpointError(f"{fields.where} lacks num_hidden_layers and no tensor of a layer is in the file")
    return count


def _check_count(fields: ConfigFields, name: str, count: int, shapes: Shapes) -> None:
    """Each layer and each expert has tensors; a count beyond theirs must not make us build a map of that size."""
    if count > len(shapes):
        raise CheckpointError(f"{fields.where} says {name}={count}, but the file holds {len(shapes)} tensors")


def _axis(shapes: Shapes, name: str, axis: int) -> int | None:
    """A size of a stored tensor, None when the tensor or the axis is missing."""
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None


def _divided(rows: int | None, by: int | None, tensor: str, what: str, fields: ConfigFields) -> int:
    """Rows of a projection over one factor, which gives the other factor."""
    assert by is not None
    if rows is None:
        raise CheckpointError(f"{fields.where} is incomplete and tensor {tensor}, which would tell, is missing")
    if rows % by:
        raise CheckpointError(f"tensor {tensor} has {rows} rows, which {what}={by} does not divide")
    return rows // by


def _check_rows(tensor: str, rows: int | None, fields: ConfigFields, factors: Mapping[str, int]) -> None:
    """A projection's rows are the product of its factors; a missing tensor is reported elsewhere."""
    (a, x), (b, y) = factors.items()
    if rows is not None and rows != x * y:
        raise CheckpointError(f"{fields.where} says {a}={x} x {b}={y} = {x * y}, but tensor {tensor} has {rows} rows")
