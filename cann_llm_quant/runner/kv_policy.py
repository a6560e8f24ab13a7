"""The KV policy of a run: what the model's files ask for, changed by what the user asks for instead."""

from dataclasses import dataclass, replace

from cann_llm_quant.checkpoint import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.kv_cache import kv_plan, kv_plan_for
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.quant.kv import KvPlan, KvScales
from cann_llm_quant.token_classes import sensitive_ids

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class KvChoice:
    """What replaces the files' own policy; None leaves it.

    `scheme` is a SPEC of kv_recipe.py (`float` turns the policy off); it replaces the policy as a whole, so that tokens
    stay in float only where that is asked for as well.
    """

    scheme: str | None = None
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    sensitive: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} {value} must not be negative")


def resolve_plan(checkpoint: Checkpoint, choice: KvChoice, num_layers: int) -> KvPlan:
    """The plan of a run.

    Raises UsageError for a scheme whose scales were never stored and for tokens to keep in float where everything is,
    CheckpointError where files contradict each other.
    """
    if choice.scheme is None:
        plan = kv_plan(checkpoint)
    else:
        plan = _given_plan(checkpoint, choice.scheme, num_layers)
    if choice.sink_tokens is not None:
        plan = replace(plan, sink_tokens=choice.sink_tokens)
    if choice.recent_tokens is not None:
        plan = replace(plan, recent_tokens=choice.recent_tokens)
    if choice.sensitive is not None:
        plan = replace(plan, sensitive=sensitive_ids(tokenizer_of(checkpoint), choice.sensitive))
    if (choice.sink_tokens or choice.recent_tokens or choice.sensitive) and not plan.quantizes:
        raise UsageError(
            "the KV cache of this run is float as a whole, so no tokens need to stay so; drop --kv-sink-tokens, "
            "--kv-recent-tokens and --kv-sensitive, or add --kv-cache with a format such as int8-token"
        )
    return plan


def _given_plan(checkpoint: Checkpoint, scheme: str, num_layers: int) -> KvPlan:
    """The plan of a SPEC; the files are read only where it needs scales."""
    wanted = parse_kv_spec(scheme, num_layers)
    needs_none = all(one is None or one.is_plain or one.dynamic for layer in wanted for one in (layer.k, layer.v))
    if needs_none:
        return KvPlan(wanted, (KvScales(),) * num_layers)
    try:
        return replace(kv_plan_for(checkpoint, wanted), sink_tokens=0, recent_tokens=0, sensitive=frozenset())
    except UsageError as error:
        raise UsageError(
            f"KV cache {scheme!r}: {error} (`quantize --method none --kv-cache ...` stores scales, -dynamic needs none)"
        ) from error


def stored_page_size(checkpoint: Checkpoint) -> int:
    """The page size that the files' policy was decided on."""
    if isinstance(checkpoint, PackedCheckpoint) and checkpoint.reader.kv_cache.layers:
        return int(checkpoint.reader.kv_cache.page_size)
    return DEFAULT_PAGE_SIZE
