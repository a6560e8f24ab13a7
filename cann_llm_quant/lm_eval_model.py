"""`cann_llm_quant` as a model of EleutherAI's lm-evaluation-harness (0.4.9 or later), which is not a dependency.

    python -m cann_llm_quant.lm_eval_model --model cann_llm_quant --model_args pretrained=FOLDER --tasks arc_easy,sciq

is `lm_eval` with this model registered; its arguments are the harness's own. The harness finds no models in other
packages by itself, so a program that calls it from Python imports this module first. `pretrained` is whatever
`LLMEngine` opens. The harness's `batch_size` counts texts and has no meaning here: `batch_tokens` counts tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from cann_llm_quant.errors import UsageError
from cann_llm_quant.evaluate.loglikelihood import BATCH_TOKENS, Request, Score, Scorer
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.tokenizer import adds_bos, chat_text, encode

MAX_NEW_TOKENS = 256  # the harness's default
UNASKED_DEVICE = "cuda:0"  # what the harness passes on when no device was asked for


@register_model("cann_llm_quant")
class CannLLMQuant(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods and greedy or sampled texts of a quantized folder or any float checkpoint."""

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        dtype: str = "fp32",
        kernel: str = "auto",
        revision: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if device is None or (device == UNASKED_DEVICE and not torch.cuda.is_available()):
            device = "cpu"
        self._engine = LLMEngine(
            pretrained,
            device=device,
            dtype=dtype,
            kernel=kernel,
            max_context=None if max_length is None else int(max_length),
            revision=revision,
        )
        self.tokenizer = self._engine.tokenizer
        self._adds_bos = adds_bos(self.tokenizer)
        self._scorer = Scorer(self._engine.model, self._engine.max_context, int(batch_tokens))
        self._name = str(pretrained)

    @property
    def eot_token_id(self) -> int:
        """EOS."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before an empty context: BOS, or EOS without one."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Part of the keys under which the harness caches requests."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, BOS by the tokenizer's own rule unless `add_special_tokens` says."""
        return encode(self.tokenizer, string, bos=self._adds_bos if add_special_tokens is None else add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat by the model's template, in the sandbox."""
        return chat_text(self.tokenizer, chat_history, generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [Request(tuple(context), tuple(rest), repr(texts)[:80]) for texts, context, rest in requests]
        answers = [(score.logprob, score.greedy) for score in self._score(asked, disable_tqdm)]
        for (texts, *_tokens), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each token once and behind as much text as fits."""
        asked: list[Request] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self._engine.max_context, context_len=1
            )
            for context, rest in map(make_disjoint_window, windows):
                asked.append(Request(tuple(context), tuple(rest), f"text {number}"))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._score(asked, disable_tqdm), strict=True):
            totals[owner] += score.logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts behind contexts, up to the first of the texts in `until`; what does not fit is cut from the left."""
        texts = []
        for context, options in tqdm([request.args for request in requests], desc="texts", disable=disable_tqdm):
            text = self._generate(context, dict(options))
            self.cache_hook.add_partial("generate_until", (context, options), text)
            texts.append(text)
        return texts

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        limit = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW_TOKENS)))
        room = self._engine.max_context - limit
        if room < 1:
            raise UsageError(
                f"max_gen_toks {limit} leaves no room for a context of the model's {self._engine.max_context} positions"
            )
        until = options.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        sampled = bool(options.get("do_sample", float(options.get("temperature", 0.0)) > 0))
        return self._engine.generate(
            self.tok_encode(context)[-room:],
            limit,
            stop=stop,
            temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            top_k=int(options.get("top_k", 0)),
        ).text

    def _score(self, requests: list[Request], disable_tqdm: bool) -> list[Score]:
        with tqdm(total=self._scorer.cost(requests), desc="tokens", disable=disable_tqdm) as bar:
            return self._scorer.score(requests, bar.update)


def main() -> None:
    """`lm_eval` with this model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
