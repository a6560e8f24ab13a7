"""llama.cpp itself, from the wheel `xllamacpp`: log-probabilities of a prompt's next token, and its tokenizer."""

import json
import urllib.request
from pathlib import Path

import torch
import xllamacpp


class LlamaCpp:
    """A server over one GGUF file, with one thread and keys and values in float32."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.warmup = False
        params.verbosity = -1
        params.n_ctx, params.n_parallel = 256, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def next_token(self, ids: list[int], vocab: int, printable: int) -> torch.Tensor:
        """Float64 log-probabilities [vocab] of the token after `ids`.

        The server reports none beside half of a character, so that it is made to answer with the token `printable`;
        what it reports is before that.
        """
        request = {"prompt": ids, "n_predict": 1, "n_probs": vocab, "logprobs": vocab, "cache_prompt": False}
        answer = self._server.handle_completions(request | {"temperature": 0, "logit_bias": [[printable, 1e4]]})
        (step,) = answer["choices"][0]["logprobs"]["content"]
        found = torch.full((vocab,), float("nan"), dtype=torch.float64)
        for token in step["top_logprobs"]:
            found[token["id"]] = token["logprob"]
        return found

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text in which names of special tokens are those tokens, with what belongs around it."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode("utf-8")
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())["tokens"]
