"""Dynamic RoPE over a prompt in chunks and over the tokens after it, against transformers' `generate`."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.runner import batch as batch_module
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.runner.sampler import Sampled, sample

TRAINED, FACTOR, STEPS = 32, 8.0, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "dynamic", "factor": FACTOR, "rope_theta": 500.0}
    target = tmp_path_factory.mktemp("dynamic")
    return save_tiny(target, dtype=torch.float32, max_position_embeddings=TRAINED, rope_parameters=rope)


def random_prompt(length: int) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(2)).tolist()


def their_steps(folder: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits before each of them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)


def our_steps(folder: Path, prompt: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Tensor]:
    seen: list[Tensor] = []

    def record(logits: Tensor, *rest: object) -> Sampled:
        seen.append(logits)
        return sample(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(batch_module, "sample", record)
    tokens = LLMEngine(folder, max_batch_tokens=chunk).generate(prompt, STEPS, ignore_eos=True).token_ids
    return list(tokens), torch.stack(seen)


@pytest.mark.parametrize("chunk", [16, 37, 512])
@pytest.mark.parametrize("length", [TRAINED - 6, TRAINED, 100])
def test_any_chunking_gives_the_logits_of_generate(
    folder: Path, length: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts within the trained length (the new tokens leave it), just as long, and three times as long."""
    prompt = random_prompt(length)
    tokens, expected = their_steps(folder, prompt)
    ours, logits = our_steps(folder, prompt, chunk, monkeypatch)
    assert ours == tokens
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def test_a_prompt_in_chunks_equals_its_evaluation_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(200)
    _, logits = our_steps(folder, prompt, 64, monkeypatch)
    (whole,) = LLMEngine(folder).logits(torch.tensor([prompt]))
    torch.testing.assert_close(logits[0], whole[-1], atol=2e-4, rtol=0)


def test_a_longer_request_before_leaves_no_trace(folder: Path) -> None:
    engine = LLMEngine(folder)
    prompt = random_prompt(TRAINED + 4)
    fresh = engine.generate(prompt, 8, ignore_eos=True).token_ids
    engine.generate(random_prompt(200), 2)
    assert engine.generate(prompt, 8, ignore_eos=True).token_ids == fresh
