"""Numbers of the server for Prometheus."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, num_running: Callable[[], float], num_open: Callable[[], float]):
        """`num_running` returns the number of responses on the device, `num_open` that of all unfinished ones."""
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "reinforce_ada", "registry": self.registry}
        timed: dict[str, Any] = own | {"buckets": SECONDS}
        self.requests = Counter("requests", "Answered requests.", ("endpoint", "status"), **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of accepted prompts.", **own)
        self.generated_tokens = Counter("generated_tokens", "Tokens of responses.", **own)
        self.cancelled = Counter("cancelled_requests", "Requests whose clients hung up.", **own)
        self.first_token_s = Histogram("first_token_seconds", "Time to the first token.", **timed)
        self.request_s = Histogram("request_seconds", "Time of a request.", **timed)
        Gauge("running_responses", "Responses on the device.", **own).set_function(num_running)
        Gauge("open_responses", "Responses not finished.", **own).set_function(num_open)
