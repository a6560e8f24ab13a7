"""What Prometheus can read at `/metrics`: requests, tokens, waiting times, and every number of the engine's `stats()`.

The registry is the application's own, so that two servers in one process do not meet. An engine number `a.b` is the
gauge `cann_llm_quant_engine_a_b`, read when the page is.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "cann_llm_quant"
FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUEST_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CLIENT_LEFT = 499  # nginx's status of a request whose client did not wait


class Metrics:
    """Counters of one application."""

    def __init__(self, stats: Callable[[], object]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineNumbers(stats))
        self.responses = Counter(
            f"{PREFIX}_http_responses", "Responses by path and status.", ("path", "status"), registry=self.registry
        )
        self.finished = Counter(
            f"{PREFIX}_requests_finished", "Answers by the reason that ended them.", ("reason",), registry=self.registry
        )
        self.in_progress = Gauge(f"{PREFIX}_requests_in_progress", "Answers being made.", registry=self.registry)
        self.prompt_tokens = Counter(f"{PREFIX}_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.generated_tokens = Counter(f"{PREFIX}_generated_tokens", "Tokens made.", registry=self.registry)
        self.first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            f"{PREFIX}_request_seconds",
            "From submission to the last token.",
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class EngineNumbers(Collector):
    """Every number of a dataclass, the dataclasses in it included, as gauges."""

    def __init__(self, stats: Callable[[], object]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: names are known once the engine is asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment."""
        for name, value in numbers_of(self._stats()):
            yield GaugeMetricFamily(f"{PREFIX}_engine_{name}", f"The engine's {name.replace('_', ' ')}.", value)


def numbers_of(value: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of a dataclass's numbers; those of a dataclass within carry its name before their own."""
    if not is_dataclass(value):
        return
    for field in fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, int | float):
            yield prefix + field.name, float(inner)
        else:
            yield from numbers_of(inner, f"{prefix}{field.name}_")


class CountResponses:
    """ASGI middleware that counts responses; paths that are no route count as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count when the status is sent."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)
