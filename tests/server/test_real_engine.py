"""The server over the real engine on a tiny checkpoint: the same texts, whatever else runs; pages come back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from fake_engine import MODEL, TEMPLATE, Running, running
from runner_tokenizers import byte_level
from tiny_models import save_tiny

from cann_llm_quant.runner import LLMEngine

PREFIX = "the thin three Thai thorn " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model over byte-level tokens, with a chat template."""
    folder = save_tiny(tmp_path_factory.mktemp("served"), dtype=torch.float32, vocab_size=320, num_hidden_layers=1)
    (folder / "tokenizer.json").unlink()
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[LLMEngine]:
    with LLMEngine(folder, max_batch_size=4, max_waiting=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine) -> Iterator[Running]:
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_texts_are_the_engines_own(client, engine) -> None:
    expected = engine.generate(PREFIX, 20, ignore_eos=True)
    options = {"model": MODEL, "prompt": PREFIX, "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, "length")
    assert whole.usage.prompt_tokens == expected.prompt_tokens
    streamed = client.completions.create(**options, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == expected.text


def test_a_chat_goes_through_the_template(client, engine) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "the thin"}], max_tokens=8, temperature=0
    )
    expected = engine.generate("user: the thin\nassistant:", 8)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (expected.text, expected.prompt_tokens)


def test_logprobs_are_those_of_the_whole_text(client, engine) -> None:
    (choice,) = client.completions.create(
        model=MODEL, prompt=[5, 9, 77], max_tokens=6, logprobs=2, seed=4, extra_body={"ignore_eos": True}
    ).choices
    ids = engine.generate([5, 9, 77], 6, temperature=1.0, seed=4, ignore_eos=True).token_ids
    (logits,) = engine.logits(torch.tensor([[5, 9, 77, *ids]]))
    exact = logits.double().log_softmax(-1)[2:-1]
    expected = [float(row[token]) for row, token in zip(exact, ids, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_c68_a_request_has_its_own_text_whatever_else_runs(client) -> None:
    requests = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "seed": 2, "frequency_penalty": 1.0},
        {"temperature": 1.2, "seed": 1, "extra_body": {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2}},
    ]

    def ask(options: dict[str, object]) -> str:
        return client.completions.create(model=MODEL, prompt=PREFIX, max_tokens=24, **options).choices[0].text

    alone = [ask(options) for options in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, requests * 2)) == alone * 2
        assert list(pool.map(ask, requests[::-1])) == alone[::-1]
    assert len(set(alone)) == 4


def test_c70_bad_requests_leave_the_others_alone(client, engine) -> None:
    expected = engine.generate("the", 30, ignore_eos=True).text
    stream = client.completions.create(
        model=MODEL, prompt="the", max_tokens=30, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [next(stream).choices[0].text]
    for field, value in [("prompt", [320]), ("prompt", [-1]), ("logit_bias", {"320": 1}), ("max_tokens", 5000)]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": MODEL, "prompt": "the", field: value})
        assert caught.value.param == field
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="the", extra_body={"stop_ids": [999]})
    assert caught.value.param == "stop_ids"
    texts += [event.choices[0].text for event in stream]
    assert "".join(texts) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_c66_pages_come_back_when_clients_leave(server, engine, stream) -> None:
    before = engine.stats().generated_tokens
    body = {"prompt": PREFIX, "max_new_tokens": 200, "ignore_eos": True, "stream": stream}
    for _ in range(3):
        with httpx.Client(base_url=server.url, timeout=0.1) as http:
            try:
                with http.stream("POST", "/generate", json=body) as response:
                    next(response.iter_lines())
            except httpx.ReadTimeout:
                pass
    for _ in range(200):
        stats = engine.stats()
        if not stats.running and not stats.waiting and not stats.pages.referenced:  # a step under way holds its pages
            break
        time.sleep(0.05)
    assert stats.pages.referenced == 0
    assert stats.pages.free + stats.pages.cached == stats.pages.total
    assert stats.generated_tokens - before < 600


def test_the_command_serves_and_ends_what_it_began(folder) -> None:
    """From the terminal: a free port, a key from the environment, SIGTERM in the middle of a stream."""
    command = [
        sys.executable,
        "-m",
        "cann_llm_quant",
        "serve",
        str(folder),
        "--port",
        "0",
        "--json",
        "--model-name",
        "m",
    ]
    environment = {**os.environ, "CANN_LLM_QUANT_API_KEY": "k\n"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert (said["status"], said["model"]) == ("ok", "m")
            with openai.OpenAI(base_url=said["url"], api_key="k", max_retries=0) as client:
                options = {"model": "m", "prompt": "the", "max_tokens": 120, "extra_body": {"ignore_eos": True}}
                stream = client.completions.create(**options, stream=True)
                next(stream)
                process.send_signal(signal.SIGTERM)
                *_, last = stream
                assert last.choices[0].finish_reason == "length"
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
