"""Figures of a served model for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tasks.serving.served_model import ServedModel

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, served: ServedModel) -> None:  # type: ignore[type-arg]
        self._served, self._registry = served, CollectorRegistry()
        self._requests = Counter(
            "finetune_requests", "Requests, by path and status.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "finetune_request_seconds",
            "Time to answer a request.",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._rows = Counter("finetune_rows", "Predicted rows.", ["usable"], registry=self._registry)
        self._review = Counter("finetune_review", "Predicted rows for a person.", registry=self._registry)
        self._tokens = Counter("finetune_tokens", "Tokens of prompts and answers.", ["of"], registry=self._registry)
        self.unrecorded_rows = 0
        self._unrecorded = Counter("finetune_unrecorded", "Rows that could not be recorded.", registry=self._registry)
        waiting = Gauge("finetune_waiting", "Requests without a whole answer.", registry=self._registry)
        waiting.set_function(lambda: served.waiting)
        switches = Gauge("finetune_switches", "Changes of the version that answers.", registry=self._registry)
        switches.set_function(lambda: served.switches)
        self._version = Gauge(
            "finetune_version", "1 for the version that answers.", ["model", "version"], registry=self._registry
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Counts a request. `path`: of a route, since any client can make up others."""
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

    def count_rows(self, usable: int, others: int) -> None:
        """Counts predicted rows, and rows with errors."""
        self._rows.labels("yes").inc(usable)
        self._rows.labels("no").inc(others)

    def count_review(self, rows: int) -> None:
        """Counts predicted rows that are for a person."""
        self._review.inc(rows)

    def count_tokens(self, prompt: int, answer: int) -> None:
        """Counts the tokens of an answer."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("answer").inc(answer)

    def count_unrecorded(self, rows: int) -> None:
        """Counts rows that could not be recorded."""
        self.unrecorded_rows += rows
        self._unrecorded.inc(rows)

    def as_text(self) -> bytes:
        """The figures in Prometheus' format."""
        self._version.clear()
        if self._served.current is not None:
            self._version.labels(self._served.name, self._served.current.model.version).set(1)
        return generate_latest(self._registry)
