"""The official `openai` client against a real uvicorn: completions, chat, streams, models, errors."""

from collections.abc import Iterator

import openai
import pytest
from fake_engine import MODEL, FakeEngine, Running, running

TEXT = "Hello, wörld!"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the thin"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(TEXT)


@pytest.fixture(scope="module")
def server(engine) -> Iterator[Running]:
    with running(engine, api_key="secret-1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-1", max_retries=0) as client:
        yield client


def test_a_completion(client, engine) -> None:
    answer = client.completions.create(model=MODEL, prompt="the thin", max_tokens=50, temperature=0, stop=["\n"])
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (TEXT, "stop", 0, None)
    prompt = engine.tokenizer.encode("the thin", add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(engine.script) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    ids, settings = engine.seen[-1]
    assert ids == prompt
    assert (settings.temperature, settings.max_new_tokens, settings.stop) == (0, 50, ("\n",))


def test_openais_defaults_are_not_the_engines(client, engine) -> None:
    client.completions.create(model=MODEL, prompt="the")
    client.completions.create(model=MODEL, prompt="the")
    (_, one), (_, other) = engine.seen[-2:]
    assert (one.temperature, one.top_p, one.max_new_tokens) == (1.0, 1.0, 16)
    assert one.seed != other.seed


def test_settings_arrive(client, engine) -> None:
    client.completions.create(
        model=MODEL,
        prompt=[5, 9, 399],
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 2, "399": -100},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "stop_ids": [6], "ignore_eos": True},
    )
    ids, settings = engine.seen[-1]
    assert ids == [5, 9, 399]
    assert settings.logit_bias == {5: 2, 399: -100}
    assert (settings.temperature, settings.top_p, settings.seed) == (0.5, 0.9, 7)
    assert (settings.presence_penalty, settings.frequency_penalty) == (0.5, -0.5)
    assert (settings.top_k, settings.min_p, settings.repetition_penalty) == (4, 0.1, 1.2)
    assert (settings.stop_ids, settings.ignore_eos) == ((6,), True)


def test_several_prompts_have_several_choices(client) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "the"], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 6
    assert client.completions.create(model=MODEL, prompt=[[5], [6], [7]], max_tokens=3).usage.prompt_tokens == 3


def test_a_streamed_completion(client) -> None:
    events = list(client.completions.create(model=MODEL, prompt="the", max_tokens=50, stream=True))
    assert "".join(event.choices[0].text for event in events) == TEXT
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events)


def test_completion_logprobs(client, engine) -> None:
    (choice,) = client.completions.create(model=MODEL, prompt="the", max_tokens=50, logprobs=3).choices
    count = len(engine.script) + 1
    assert choice.logprobs.token_logprobs == [-0.25] * count
    assert choice.logprobs.tokens[:2] == ["H", "e"]
    others = [engine.tokenizer.decode([token]) for token in (10, 11)]
    assert choice.logprobs.top_logprobs[0] == {"H": -0.25, others[0]: -2.0, others[1]: -9999.0}
    for offset, token in zip(choice.logprobs.text_offset[:5], choice.logprobs.tokens[:5], strict=True):
        assert choice.text[offset:].startswith(token)
    streamed = list(client.completions.create(model=MODEL, prompt="the", max_tokens=50, logprobs=3, stream=True))
    assert [event.choices[0].logprobs.text_offset[0] for event in streamed] == choice.logprobs.text_offset
    assert [event.choices[0].logprobs.tokens[0] for event in streamed] == choice.logprobs.tokens


def test_a_chat(client, engine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=50)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    ids, _ = engine.seen[-1]
    assert engine.tokenizer.decode(ids) == "system: Be brief.\nuser: the thin\nassistant:"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.object == "chat.completion"


def test_a_chat_may_fill_the_context(client, engine) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT)
    ids, settings = engine.seen[-1]
    assert len(ids) + settings.max_new_tokens == engine.max_context


def test_messages_in_parts(client, engine) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "thin"}]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "user: the thin\nassistant:"


def test_a_streamed_chat_with_usage(client, engine) -> None:
    events = list(
        client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
    )
    *tokens, last = events
    assert tokens[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in tokens) == TEXT
    assert tokens[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == len(engine.script) + 1
    assert last.usage.prompt_tokens == len(engine.seen[-1][0])
    assert all(event.usage is None for event in tokens)


def test_chat_logprobs(client) -> None:
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=3
    ).choices
    first, *_ = content = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("H", [72], -0.25)
    assert [entry.logprob for entry in first.top_logprobs] == [-0.25, -2.0, -9999.0]
    assert any(entry.bytes is None for entry in content) == any("\ufffd" in entry.token for entry in content)
    (bare,) = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2, logprobs=True).choices
    assert [entry.top_logprobs for entry in bare.logprobs.content] == [[], []]


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "cann-llm-quant"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_an_unknown_model(client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert "'gpt-4' is not served here; it is 'tiny'" in caught.value.message


@pytest.mark.parametrize("key", ["wrong", "secret-", "secret-12"])
def test_a_wrong_key(server, key) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_bad_requests_name_the_field(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="the", max_tokens=300)
    assert caught.value.param == "max_tokens"
    assert "max_tokens 300 exceed the context" in caught.value.message
    assert "max_new_tokens" not in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[*CHAT, {"role": "system", "content": "x"}])
    assert caught.value.param == "messages"
    assert "system comes first" in caught.value.message


def test_too_many_requests(client, engine) -> None:
    engine.room = 1
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=["a", "b"])
        assert caught.value.response.headers["retry-after"] == "1"
        assert engine.live == []  # the prompt that was taken is given back
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].text == "He"
    finally:
        engine.room = 1000


def test_a_model_that_fails(client, engine) -> None:
    engine.broken = True
    try:
        with pytest.raises(openai.InternalServerError, match="hold nan"):
            client.completions.create(model=MODEL, prompt="a")
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert next(stream).choices[0].text == "H"
        with pytest.raises(openai.APIError, match="hold nan"):
            next(stream)
    finally:
        engine.broken = False
