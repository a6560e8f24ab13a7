"""What the server refuses, and how: field case C70, bodies that are no requests, sizes, keys."""

import json
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import MODEL, FakeEngine, Running, running

LIMIT = 20_000


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine) -> Iterator[Running]:
    with running(engine, max_body_bytes=LIMIT) as server:
        yield server


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def refused(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return body["error"]


BAD_FIELDS = [
    ("prompt", [-1], "prompt"),
    ("prompt", [400], "prompt"),
    ("prompt", [[5], []], None),
    ("prompt", 5, "prompt"),
    ("prompt", [5, "a"], "prompt"),
    ("prompt", None, "prompt"),
    ("prompt", ["a"] * 129, "prompt"),
    ("prompt", "a\ud800", "prompt"),
    ("prompt", ["a", "\udfff"], "prompt"),
    ("stop", "\ud800", "stop"),
    ("stop_ids", [999], "stop_ids"),
    ("stop_ids", [-1], "stop_ids"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -3, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", 1000, "max_tokens"),
    ("n", 0, "n"),
    ("n", 2, "n"),
    ("temperature", -1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("min_p", 2, "min_p"),
    ("top_k", -1, "top_k"),
    ("seed", -1, "seed"),
    ("seed", 2**63, "seed"),
    ("seed", 10**60, "seed"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 3, "presence_penalty"),
    ("frequency_penalty", -3, "frequency_penalty"),
    ("logit_bias", {"400": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"a": 1}, "logit_bias.a"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", [5], "logit_bias"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", -1, "logprobs"),
    ("stop", "", "stop"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", [1], "stop"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("tools", [], "tools"),
    ("echo", True, "echo"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
def test_c70_a_bad_field_is_named(http, engine, field, value, param) -> None:
    before = len(engine.seen)
    body = json.dumps({"model": MODEL, "prompt": "the", field: value})
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    if param is None:
        assert response.status_code == 200  # an empty prompt is BOS
        return
    error = refused(response, 400)
    assert str(error["param"]).rstrip(".0123456789-") == param
    assert field in str(error["message"])
    assert len(engine.seen) == before


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty"])
def test_c70_numbers_that_json_does_not_have(http, number, field) -> None:
    content = f'{{"model": "{MODEL}", "prompt": "the", "{field}": {number}}}'
    error = refused(http.post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400)
    assert error["param"] == field


def test_c70_the_other_requests_go_on(http) -> None:
    good = {"model": MODEL, "prompt": "the", "max_tokens": 2}
    for field, value, _ in BAD_FIELDS[:6]:
        assert http.post("/v1/completions", json=good | {field: value}).status_code in (200, 400)
        assert http.post("/v1/completions", json=good).json()["choices"][0]["text"] == "He"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "image": "b"}]}, "messages.0.image"),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 300}], "max_tokens": 5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"n": 3}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_chats(http, change, param) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the"}]} | change
    assert refused(http.post("/v1/chat/completions", json=body), 400)["param"] == param


def test_parts_that_are_no_text(http) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
    assert str(refused(http.post("/v1/chat/completions", json=body), 400)["param"]).startswith("messages.0.content")


def test_a_model_without_a_chat_template(http, engine) -> None:
    template, engine.tokenizer.chat_template = engine.tokenizer.chat_template, None
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "the"}]}
        error = refused(http.post("/v1/chat/completions", json=body), 400)
    finally:
        engine.tokenizer.chat_template = template
    assert error["param"] == "messages"
    assert "no chat template" in str(error["message"])


def test_generate(http, engine) -> None:
    answer = http.post("/generate", json={"prompt": [5, 6], "max_new_tokens": 2, "logprobs": 1}).json()
    assert answer == {
        "text": "He",
        "token_ids": engine.script[:2],
        "finish_reason": "length",
        "logprobs": [{"logprob": -0.25, "top": [[token, -0.25]]} for token in engine.script[:2]],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    assert engine.seen[-1][1].temperature == 0
    assert refused(http.post("/generate", json={"prompt": "a", "max_new_tokens": 0}), 400)["param"] == "max_new_tokens"
    assert refused(http.post("/generate", json={"max_new_tokens": 1}), 400)["param"] == "prompt"


def test_generated_events(http, engine) -> None:
    with http.stream("POST", "/generate", json={"prompt": "a", "max_new_tokens": 3, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    *tokens, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [event["token_id"] for event in tokens] == engine.script[:3]
    assert last == {"usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'"a"',
        b"\xff\xfe",
        b"[" * 9_000,
        b'{"model": "\\ud800", "prompt": "a", "\\ud800": 1}',
        b"1" * 5_000,
    ],
)
def test_bodies_that_are_no_requests(http, content) -> None:
    refused(http.post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400)


def test_another_content_type_is_explained(http) -> None:
    response = http.post("/generate", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "content-type: application/json" in str(refused(response, 400)["message"])


def test_bodies_that_are_too_large(http) -> None:
    body = json.dumps({"prompt": "a" * LIMIT}).encode()
    json_type = {"content-type": "application/json"}
    assert "20000 bytes" in str(refused(http.post("/generate", content=body, headers=json_type), 413)["message"])
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    refused(http.post("/generate", content=chunks, headers=json_type), 413)
    assert http.get("/health").status_code == 200


def test_unknown_paths_and_methods(http) -> None:
    refused(http.get("/v2/completions"), 404)
    refused(http.get("/v1/completions"), 405)


def test_a_key_guards_everything_but_health(engine) -> None:
    with running(engine, api_key="schlüssel") as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            refused(http.get(path), 401)
        refused(http.post("/generate", content=b"not even JSON"), 401)
        for header in ("Bearer schlüssel", "bearer  schlüssel"):
            assert http.get("/v1/models", headers={"authorization": header.encode()}).status_code == 200
        for header in ("schlüssel", "Basic schlüssel", "Bearer", "Bearer schlüsse", "Bearer schlussel"):
            refused(http.get("/v1/models", headers={"authorization": header.encode()}), 401)
        refused(http.get("/v1/models", headers={"authorization": b"Bearer \xff"}), 401)
