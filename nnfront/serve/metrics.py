# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` shows, in the text form of Prometheus; names and meanings are those of other servers of language models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nnfront.serve.engine import Engine

PREFIX = "nnfront:"


class EngineMetrics(Collector):
    """Reads an engine's counts when it is asked for them."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def text(self) -> bytes:
        """All metrics as they are now."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        now, stats, label = self._engine.counts(), self._engine.stats, [self._model]
        gauges = [
            ("num_requests_running", "Requests that are being answered", now["running"]),
            ("num_requests_waiting", "Requests that wait for their turn", now["waiting"]),
            (
                "kv_cache_usage_perc",
                "Share of the pages that are in use by requests that run",
                now["pages_used"] / now["pages"],
            ),
            ("snapshot_bytes", "Copies of recurrent states behind chunks of prompts", now["snapshot_bytes"]),
        ]
        counters = [
            ("num_preemptions", "Requests that gave their pages back and began again", now["preemptions"]),
            (
                "prefix_cache_queries",
                "Tokens of prompts that were looked for among those computed",
                stats.prefix_queries,
            ),
            ("prefix_cache_hits", "Tokens of prompts that were found there", stats.prefix_hits),
            ("prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("generation_tokens", "Tokens that were drawn", stats.generation_tokens),
            ("spec_decode_num_draft_tokens", "Tokens that were guessed", now["drafted"]),
            ("spec_decode_num_accepted_tokens", "Tokens that were guessed right", now["accepted"]),
        ]
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, about, value in numbers:
                number = kind(PREFIX + name, about, labels=["model_name"])
                number.add_metric(label, value)
                yield number
        ends = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended", labels=["model_name", "finished_reason"]
        )
        for reason, count in dict(stats.ends).items():
            ends.add_metric([*label, reason], count)
        yield ends
        for name, about, histogram in [
            ("time_to_first_token_seconds", "From a request to its first token", stats.first_token),
            ("inter_token_latency_seconds", "From a token to the next", stats.between),
            ("e2e_request_latency_seconds", "From a request to its end", stats.whole),
            ("request_queue_time_seconds", "From a request to its turn", stats.queued),
            ("request_prefill_time_seconds", "From a request's turn to its first token", stats.prefill),
            ("request_decode_time_seconds", "From a request's first token to its end", stats.decode),
            ("iteration_tokens_total", "Tokens computed in a step", stats.step_tokens),
        ]:
            family = HistogramMetricFamily(PREFIX + name, about, labels=["model_name"])
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            counts = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric(label, counts, histogram.sum)
            yield family
