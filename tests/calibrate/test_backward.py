"""Fisher statistics of the streamed backward pass against autograd through transformers' whole model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.calibrate.backward import Contribution, LinearFisher, StreamedBackward, _draw
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint

CPU = torch.device("cpu")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def token_ids(windows: int = 3, length: int = 20) -> Tensor:
    return torch.randint(3, 128, (windows, length), generator=torch.Generator().manual_seed(5))


def streamed(
    model: Path, scratch: Path, ids: Tensor, budget: int = 1 << 30
) -> tuple[list[Contribution], dict[int, dict[str, LinearFisher]]]:
    scratch.mkdir()
    with open_checkpoint(str(model)) as checkpoint:
        store = StateStore(len(ids), budget=budget, scratch=scratch, device=CPU)
        arch = arch_from_checkpoint(checkpoint)
        passes = StreamedBackward(checkpoint, arch, ids, store, device=CPU, dtype=torch.float32)
        contributions = passes.forward()
        passes.output_gradients(seed=0)
        return contributions, dict(passes.layers())


def whole_model(model: Path, ids: Tensor) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], list[Tensor]]:
    """Inputs and output gradients of every linear, window by window, and the hidden states of the last window."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            output.register_hook(lambda g: seen.setdefault(name, []).append((inputs[0].detach()[0], g[0])))

        return keep

    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook(name))
    generator = torch.Generator().manual_seed(0)
    states: list[Tensor] = []
    for window in ids:
        output = theirs(window[None], output_hidden_states=True)
        log_p = output.logits[0].log_softmax(-1)
        log_p.gather(1, _draw(log_p.detach(), generator)).sum().backward()
        states = [state.detach()[0] for state in output.hidden_states]
    return seen, states


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("qwen2", False)])
def test_statistics_equal_those_of_autograd_through_the_whole_model(tmp_path: Path, family: str, tied: bool) -> None:
    model, ids = save_tiny(tmp_path / "model", family, dtype=torch.float32, tie_word_embeddings=tied), token_ids()
    _, found = streamed(model, tmp_path / "scratch", ids)
    expected, _ = whole_model(model, ids)
    assert set(found) == {0, 1}
    for index, roles in found.items():
        assert set(roles) == {"q", "k", "v", "o", "gate", "up", "down"}
        for role, fisher in roles.items():
            part = "self_attn" if role in "qkvo" else "mlp"
            pairs = expected[f"model.layers.{index}.{part}.{role}_proj"]
            x, g = (torch.cat(rows).double() for rows in zip(*pairs, strict=True))
            weight = g.square().sum(1)
            assert fisher.tokens == ids.numel()
            close(fisher.hessian, x.T @ x)
            close(fisher.squares, g.square().sum(0))
            close(fisher.weighted, (x * weight[:, None]).T @ x)


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).abs().max()) < 2e-4 * float(expected.abs().max())


def test_experts_are_differentiated_on_their_own_tokens(tmp_path: Path) -> None:
    model, ids = save_tiny(tmp_path / "model", "qwen3_moe", dtype=torch.float32, **MOE), token_ids()
    _, found = streamed(model, tmp_path / "scratch", ids)
    fisher = found[1]
    # Every token goes to two experts, and the gradient of the router's choice flows through both.
    assert sum(f.tokens for role, f in fisher.items() if role.endswith(".gate")) == 2 * ids.numel()
    assert "router" not in fisher
    expected, _ = whole_model(model, ids)
    x, g = (torch.cat(rows).double() for rows in zip(*expected["model.layers.0.self_attn.o_proj"], strict=True))
    close(found[0]["o"].squares, g.square().sum(0))
    close(found[0]["o"].hessian, x.T @ x)


def test_states_in_files_give_the_same_bits(tmp_path: Path) -> None:
    model, ids = save_tiny(tmp_path / "model"), token_ids()
    _, memory = streamed(model, tmp_path / "a", ids)
    _, files = streamed(model, tmp_path / "b", ids, budget=0)
    for role, fisher in memory[0].items():
        assert torch.equal(fisher.weighted, files[0][role].weighted)
        assert torch.equal(fisher.squares, files[0][role].squares)


def test_what_layers_contribute(tmp_path: Path) -> None:
    model, ids = save_tiny(tmp_path / "model", dtype=torch.float32), token_ids(windows=1)
    found, _ = streamed(model, tmp_path / "scratch", ids)
    _, states = whole_model(model, ids)
    x, y = states[0].double(), states[1].double()  # the last state of transformers is normed, the first two are not
    cosine = ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).mean()
    change = ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()
    assert found[0].cosine == pytest.approx(float(cosine), rel=1e-5)
    assert found[0].change == pytest.approx(float(change), rel=1e-5)


def test_labels_are_drawn_with_their_probabilities() -> None:
    p = torch.tensor([0.5, 0.0, 0.125, 0.375])
    labels = _draw(p.log().expand(20_000, 4), torch.Generator().manual_seed(0))
    share = labels.flatten().bincount(minlength=4) / 20_000
    assert float(share[1]) == 0.0
    assert float((share - p).abs().max()) < 4 * (0.25 / 20_000) ** 0.5
