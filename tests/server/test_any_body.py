"""Whatever JSON comes: an answer or a refusal that names a field, never a failure of the server."""

import json
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import MODEL, FakeEngine, running
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.server.request_bodies import ChatRequest, CompletionRequest, GenerateRequest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 500)
    | st.floats()
    | st.text(max_size=5)
    | st.just("the")
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": VALUES | st.text()}),
    max_size=3,
)
FORMS = {
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "the"}),
    "/v1/chat/completions": (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": "the"}]}),
    "/generate": (GenerateRequest, {"prompt": "the"}),
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running(FakeEngine()) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_body_breaks_the_server(http, data) -> None:
    path = data.draw(st.sampled_from(sorted(FORMS)))
    form, good = FORMS[path]
    names = st.sampled_from(sorted(form.model_fields)) | st.text(max_size=4)
    changes = data.draw(st.dictionaries(names, VALUES, max_size=2))
    if "messages" in good:
        changes |= {"messages": data.draw(st.just(good["messages"]) | MESSAGES)}
    content = json.dumps(good | changes)
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (content, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("field", ["stop", "stop_ids"])
@pytest.mark.parametrize("path", sorted(FORMS))
def test_no_stops_are_no_default(http, path: str, field: str) -> None:
    response = http.post(path, json=FORMS[path][1] | {field: []})
    assert response.status_code == 200, response.text
