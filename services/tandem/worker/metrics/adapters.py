"""The gauge of a worker's LoRA adapters, like vLLM's `vllm:lora_requests_info`."""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from tandem.engine.types import AdapterStats
from tandem.net.observability.metrics import gauges


def adapter_metrics(
    labels: Mapping[str, str], adapters: AdapterStats, max_loras: int
) -> Iterator[Metric]:
    """Yields the gauge. The labels name the adapters, and the value is the time of the scrape."""
    names = [*labels, "running_lora_adapters", "waiting_lora_adapters", "max_lora"]
    found = [",".join(adapters.running), ",".join(adapters.waiting), str(max_loras)]
    text = (
        "LoRA adapters of running and of waiting sequences, in the labels; the value is the "
        "time of the scrape"
    )
    yield gauges(
        "tandem_lora_requests_info", text, names, [([*labels.values(), *found], time.time())]
    )
