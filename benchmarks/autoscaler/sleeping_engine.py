"""A cluster whose engines compute nothing: each step sleeps as long as a named GPU would take.

    python -m benchmarks.autoscaler.sleeping_engine up OPTIONS      `tandem up` with such workers
    python -m benchmarks.autoscaler.sleeping_engine worker OPTIONS  one such worker
    python -m benchmarks.autoscaler.sleeping_engine                 its engine process

Scheduler, KV cache, transfers, worker, router, Ray and Redis are the real ones. The model is an 8B
Llama in bf16. Its step times follow from the data sheet of the card (`GPUS`): a step reads all
weights and the KV of its decoding sequences at 80% of the memory bandwidth, and multiplies its
prompts' tokens at 50% of the dense bf16 rate. No such card was measured here.

GPU, LOAD_S (seconds until the weights are loaded) and AUTOSCALE (JSON of `AutoscaleConfig`, instead
of the few options that `tandem up` has for it) are environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates

GPU, LOAD_S, AUTOSCALE = "SLEEPING_GPU", "SLEEPING_LOAD_S", "SLEEPING_AUTOSCALE"
MODULE = "benchmarks.autoscaler.sleeping_engine"

WEIGHTS = 8.03e9
WEIGHT_BYTES = 2 * WEIGHTS
KV_TOKEN_BYTES = 2 * 2 * 32 * 8 * 128  # K and V, bf16, layers, heads, head size
CONTEXT_FLOP = 4 * 32 * 4096  # of a token, for each token before it
MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.5
POOL_SHARE = 0.9  # of the memory is for weights and KV
STEP_S = 5e-3  # of a prefill step, beyond its products
TOKEN_ID = 300  # of every answer


@dataclass(frozen=True)
class Gpu:
    """A card's data sheet."""

    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float  # bf16, dense

    @property
    def kv_tokens(self) -> int:
        return int((POOL_SHARE * self.memory_bytes - WEIGHT_BYTES) / KV_TOKEN_BYTES)

    @property
    def weights_s(self) -> float:
        return WEIGHT_BYTES / (MEMORY_SHARE * self.bytes_per_s)

    @property
    def context_s(self) -> float:
        """Seconds that a decode step takes longer for each token of its contexts."""
        return KV_TOKEN_BYTES / (MEMORY_SHARE * self.bytes_per_s)

    @property
    def prefill(self) -> PrefillRate:
        flop_per_s = COMPUTE_SHARE * self.flop_per_s
        return PrefillRate(STEP_S, 2 * WEIGHTS / flop_per_s, CONTEXT_FLOP / flop_per_s)

    def decode(self, context: float) -> DecodeRate:
        """Rate of sequences of so many tokens."""
        return DecodeRate(self.weights_s, context * self.context_s)

    def rates(self, context: float, step_tokens: int = 512) -> WorkerRates:
        return WorkerRates(
            self.prefill,
            self.decode(context),
            step_tokens,
            block_bytes=16 * KV_TOKEN_BYTES,
            measured=True,
        )

    def step_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step with these (tokens, tokens of their context at the end)."""
        decoding = [context for tokens, context in chunks if tokens == 1]
        prompts = [(tokens, context) for tokens, context in chunks if tokens > 1]
        seconds = self.weights_s + self.context_s * sum(decoding) if decoding else 0.0
        rate = self.prefill
        if prompts and not decoding:
            seconds += rate.step_s
        for tokens, context in prompts:
            before = (context - tokens) * tokens + tokens * (tokens - 1) // 2
            seconds += tokens * rate.token_s + before * rate.token_context_s
        return seconds


GPUS = {
    "L4": Gpu(24e9, 300e9, 121e12),
    "A100": Gpu(80e9, 2.04e12, 312e12),
    "H100": Gpu(80e9, 3.35e12, 989e12),
}


def engine_main() -> None:
    import torch

    from tandem.engine.executor.runner import HostTokens, ModelRunner
    from tandem.engine.scheduler.batch import StepBatch
    from tandem.worker.engine_process import process
    from tandem_kernels.sampling import Draw

    gpu = GPUS[os.environ[GPU]]

    class SleepingRunner(ModelRunner):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            time.sleep(float(os.environ.get(LOAD_S, "0")))
            super().__init__(*arguments, **more)
            self._row = torch.zeros(1, self.vocab_size)

        def forward(
            self, batch: StepBatch, on_kv_written: Callable[[], object] | None = None
        ) -> torch.Tensor:
            until = time.perf_counter() + gpu.step_s(
                [(each.num_tokens, each.context_len) for each in batch.slices]
            )
            num_rows = sum(each.num_logits for each in batch.slices)
            time.sleep(max(0.0, until - time.perf_counter()))
            if on_kv_written is not None:
                on_kv_written()
            return self._row.expand(num_rows, -1)

        def start_sampling(
            self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
        ) -> HostTokens:
            return HostTokens([TOKEN_ID] * len(draws))

    process.ModelRunner = SleepingRunner  # type: ignore[misc]
    process.main()


def worker_main() -> None:
    from tandem.worker.__main__ import main

    main(MODULE)


def up_main() -> int:
    import msgspec

    from tandem.cluster.launch import launcher, options
    from tandem.cluster.pools import ClusterSpec
    from tandem.common.config.autoscale import AutoscaleConfig
    from tandem.ops.commands import up

    make_spec = options.make_spec

    def sleeping_spec(*arguments: Any, **more: Any) -> ClusterSpec:
        spec = make_spec(*arguments, **more)
        pools = dict(spec.pools)
        for role in ("prefill", "decode"):
            command = list(pools[role].command)
            at = command.index("tandem.worker")
            command[at : at + 1] = [MODULE, "worker"]
            pools[role] = msgspec.structs.replace(pools[role], command=command)
        return msgspec.structs.replace(spec, pools=pools)

    launcher.make_spec = sleeping_spec  # type: ignore[attr-defined]
    if settings := os.environ.get(AUTOSCALE):
        config = AutoscaleConfig(**json.loads(settings))
        options.LaunchOptions.autoscaler = config  # type: ignore[assignment]
    return up(*sys.argv[1:])


if __name__ == "__main__":
    role = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if role == "up":
        sys.exit(up_main())
    worker_main() if role == "worker" else engine_main()
