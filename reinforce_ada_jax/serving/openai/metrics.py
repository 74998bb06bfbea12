"""Numbers of the server for Prometheus."""

from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, num_running: Callable[[], float], num_open: Callable[[], float]):
        """`num_running` returns the responses on the device, `num_open` all that are not finished."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "reinforce_ada_requests", "Answered requests.", ("endpoint", "status"), registry=self._registry
        )
        self.prompt_tokens = Counter(
            "reinforce_ada_prompt_tokens", "Tokens of accepted prompts.", registry=self._registry
        )
        self.generated_tokens = Counter(
            "reinforce_ada_generated_tokens", "Tokens of responses.", registry=self._registry
        )
        self.cancelled = Counter(
            "reinforce_ada_cancelled_requests", "Requests whose clients hung up.", registry=self._registry
        )
        self.first_token_s = Histogram(
            "reinforce_ada_first_token_seconds", "Time to the first token.", buckets=SECONDS, registry=self._registry
        )
        self.request_s = Histogram(
            "reinforce_ada_request_seconds", "Time of a request.", buckets=SECONDS, registry=self._registry
        )
        running = Gauge("reinforce_ada_running_responses", "Responses on the device.", registry=self._registry)
        running.set_function(num_running)
        unfinished = Gauge("reinforce_ada_open_responses", "Responses not finished.", registry=self._registry)
        unfinished.set_function(num_open)

    def page(self) -> bytes:
        """Returns the numbers in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)
