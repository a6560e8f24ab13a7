"""The source as a run reads it: as it is, or rotated where the recipe asks for that, and what the user should know."""

from collections.abc import Callable

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.models import arch_from_checkpoint, unclaimed
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.rotated_checkpoint import RotatedCheckpoint
from cann_llm_quant.pipeline.request import Event
from cann_llm_quant.recipe import Recipe


def rotated_source(source: Checkpoint, recipe: Recipe, tell: Callable[[Event], None]) -> Checkpoint:
    """`source`, seen rotated by the calibration's seed if `recipe.rotate`.

    Raises UnsupportedError for models that cannot be rotated as a whole.
    """
    if not recipe.rotate:
        return source
    arch = arch_from_checkpoint(source)
    _require_whole(source, arch)
    seed = recipe.calibration.seed
    view = RotatedCheckpoint(source, arch, seed)
    tell(Event("prepare", message=f"the residual stream and all values are rotated (Hadamard matrices, seed {seed})"))
    if view.unties_head:
        message = (
            f"{arch.head_module} is stored on its own: the final norm's gain moved into it, not into the embedding"
        )
        tell(Event("prepare", message=message, warning=True))
    if any(layer.moe is not None for layer in arch.layers):
        message = "routers are rotated with the stream that they read: they choose as before, but are not bit-equal"
        tell(Event("prepare", message=message, warning=True))
    return view


def _require_whole(source: Checkpoint, arch: Arch) -> None:
    """Tensors beside the map may read the residual stream, and would then read another one."""
    head = f"{arch.head_module}.weight"
    beside = [n for n in unclaimed(arch, list(source.tensors)) if n != head and not n.endswith("rotary_emb.inv_freq")]
    if beside:
        raise UnsupportedError(
            f"tensor {beside[0]} has no place in the map of {arch.model_type} and would not be rotated with the rest; "
            "leave out --rotate"
        )
