"""Clients that leave, servers that are told to stop, and what the metrics say of it all."""

import threading
import time
from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeEngine, running
from prometheus_client.parser import text_string_to_metric_families

from cann_llm_quant.errors import UsageError
from cann_llm_quant.server.serving import is_loopback, open_socket, url_of

LONG = "the thin three Thai thorn " * 6


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


def metrics(http: httpx.Client) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name.removeprefix("cann_llm_quant_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("stream", [False, True])
def test_c66_a_client_that_leaves_ends_its_request(stream) -> None:
    engine = FakeEngine(LONG, delay=0.05)
    with running(engine) as server:
        body = {"prompt": "a", "max_new_tokens": 200, "stream": stream}
        with httpx.Client(base_url=server.url, timeout=0.5) as http:
            if stream:
                with http.stream("POST", "/generate", json=body) as response:
                    assert next(response.iter_lines()).startswith("data: ")
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post("/generate", json=body)
        eventually(lambda: engine.handles[0].cancelled)
        with httpx.Client(base_url=server.url, timeout=30) as http:
            eventually(lambda: metrics(http)["requests_in_progress",] == 0)
            numbers = metrics(http)
            assert numbers["requests_finished_total", "cancelled"] == 1
            assert numbers["http_responses_total", "/generate", "200" if stream else "499"] == 1
            assert http.post("/generate", json=body | {"max_new_tokens": 1, "stream": False}).status_code == 200
    assert not engine.handles[0].finished


def test_metrics_count_what_happened() -> None:
    engine = FakeEngine("Hello")
    with running(engine) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        http.post("/generate", json={"prompt": [5, 6, 7], "max_new_tokens": 2})
        http.post("/generate", json={"prompt": [5], "max_new_tokens": 50})
        http.post("/generate", json={"prompt": [-1]})
        http.get("/nowhere")
        http.get("/elsewhere")
        numbers = metrics(http)
    assert numbers["http_responses_total", "/generate", "200"] == 2
    assert numbers["http_responses_total", "/generate", "400"] == 1
    assert numbers["http_responses_total", "other", "404"] == 2
    assert numbers["prompt_tokens_total",] == 4
    assert numbers["generated_tokens_total",] == 2 + len(engine.script) + 1
    assert numbers["requests_finished_total", "length"] == 1
    assert numbers["requests_finished_total", "stop"] == 1
    assert numbers["time_to_first_token_seconds_count",] == 2
    assert numbers["request_seconds_count",] == 2
    assert numbers["requests_in_progress",] == 0
    assert numbers["engine_running",] == 0
    assert (numbers["engine_cache_queries",], numbers["engine_cache_hit_rate",]) == (7, 0.5)


class Stream(threading.Thread):
    """A client that reads a stream on a thread of its own."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"prompt": "a", "max_new_tokens": 200, "stream": True}
        with (
            httpx.Client(base_url=self.url, timeout=30) as http,
            http.stream("POST", "/generate", json=body) as response,
        ):
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)


def test_a_shutdown_finishes_what_was_begun_and_takes_no_more() -> None:
    engine = FakeEngine(LONG[:40], delay=0.05)
    with running(engine, drain_seconds=30) as server, httpx.Client(base_url=server.url) as http:
        stream = Stream(server.url)
        stream.start()
        eventually(lambda: stream.lines)
        server.server.begin_drain()
        response = http.post("/generate", json={"prompt": "a"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "shutting_down"
        assert http.get("/health").status_code == 503
        stream.join(30)
        assert stream.lines[-1] == "data: [DONE]"
        assert len(stream.lines) == len(engine.script) + 1 + 2
        server.thread.join(30)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    assert len(engine.seen) == 1


@pytest.mark.parametrize("signals", [1, 2])
def test_a_shutdown_has_an_end(signals) -> None:
    """By its time limit, or at once when told a second time; the client is told why its text ends."""
    engine = FakeEngine(LONG, delay=0.1)
    with running(engine, drain_seconds=0.3 if signals == 1 else 600) as server:
        stream = Stream(server.url)
        stream.start()
        eventually(lambda: stream.lines)
        for _ in range(signals):
            server.server.begin_drain()
        server.thread.join(30)
        assert not server.thread.is_alive()
        stream.join(30)
    assert engine.handles[0].cancelled
    assert '"code":"shutting_down"' in stream.lines[-1]
    assert "data: [DONE]" not in stream.lines


def test_sockets() -> None:
    with open_socket("127.0.0.1", 0) as bound:
        bound.listen()
        assert is_loopback(bound)
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}"
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 cannot be used"):
            open_socket("127.0.0.1", port)
    with open_socket("0.0.0.0", 0) as everywhere:
        assert not is_loopback(everywhere)
    with pytest.raises(UsageError, match="--host no-such-host"):
        open_socket("no-such-host.invalid", 0)
    with pytest.raises(UsageError, match="port 99999"):
        open_socket("127.0.0.1", 99999)
