"""Measures the Triton path on a GPU: floor, measured and ratio, for Llama-3-8B's shape.

    python -m benchmarks.gpu.kernels           one CUDA device, under 8 minutes
    TRITON_INTERPRET=1 python -m benchmarks.gpu.kernels --smoke     tiny shapes on a CPU

Random bfloat16 weights; needs torch, Triton and, for the last part, transformers: neither Ray nor
NIXL nor Redis. It reads its options with argparse, as it also runs where Tandem's dependencies are
not installed. The floors are measured in the same run: a copy's bandwidth, a product's rate. KV
tiers' copies of blocks are checked byte by byte. Parts that fail are reported and do not stop the
others. Writes benchmarks/results/gpu.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.model import LLAMA_3_8B, SMOKE, Size, make_weights, weight_bytes
from benchmarks.gpu.peer import generate_with_transformers
from benchmarks.gpu.tiers import measure_tiers
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.executor.step_tokens import default_step_tokens
from tandem.engine.executor.triton.steps import TritonSteps
from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool, layer_of, make_pool
from tandem_kernels.sampling import Draw
from tandem_kernels.triton.blocks import pack, pack_spans
from tandem_kernels.triton.decode_attention import choose_splits, decode_attention
from tandem_kernels.triton.prefill_attention import prefill_attention
from tandem_kernels.triton.tuning import choices, num_multiprocessors

RESULTS = Path("benchmarks") / "results" / "gpu.json"
GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


class Bench:
    """The rows of the table, and the two floors that everything is held against."""

    def __init__(
        self,
        size: Size,
        device: torch.device,
        on_row: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """`on_row` is called with each row as it comes. Without it, rows are printed."""
        self._on_row = on_row
        self.size = size
        self.device = device
        self.rows: list[dict[str, Any]] = []
        self.began = time.monotonic()
        with self.part("floors"):
            self._measure_floors()

    @contextmanager
    def part(
        self, name: str, mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode
    ) -> Iterator[None]:
        """A part of the table; its failure becomes a row."""
        print(f"--- {name} ({time.monotonic() - self.began:.0f} s)", flush=True)
        try:
            with mode():
                yield
        except Exception:  # the other parts' figures are worth having
            traceback.print_exc()
            self.rows.append({"what": name, "error": str(sys.exc_info()[1])})
        gc.collect()  # of recorded graphs, which point to one another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, what: str, floor_s: float, measured_s: float, goal: float | None = None) -> None:
        row = {"what": what, "floor_ms": floor_s * 1e3, "measured_ms": measured_s * 1e3}
        row |= {"ratio": floor_s / measured_s, "goal": goal}
        self.rows.append(row)
        if self._on_row is not None:
            self._on_row(row)
            return
        wanted = "" if goal is None else f"   goal {goal:.0%}"
        times = f"{row['floor_ms']:10.3f} ms{row['measured_ms']:10.3f} ms{row['ratio']:8.1%}"
        print(f"{what:60}{times}{wanted}")

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of one call on the device."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        return float(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median")) / 1e3

    def wall_seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Median of one call, the host's part counted in; `run` waits for the device itself."""
        times = []
        num_warmups = 2 if self.device.type == "cuda" else 0
        for _ in range(repeats + num_warmups):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return sorted(times[num_warmups:])[repeats // 2]

    def _measure_floors(self) -> None:
        source = torch.ones(self.size.copy_bytes // 2, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.seconds(lambda: target.copy_(source))
        self.bytes_per_s = 2 * self.size.copy_bytes / copy_s
        n = self.size.square
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.flop_per_s = 2 * n**3 / self.seconds(lambda: a @ b)
        print(
            f"copy {self.bytes_per_s / 1e9:,.1f} GB/s, bf16 {self.flop_per_s / 1e12:,.3f} TFLOP/s"
        )


def paged_pool(bench: Bench, *, layer_major: bool, num_blocks: int, layers: int) -> torch.Tensor:
    """Returns a pool [blocks, heads, layers, 2, block size, D], or layer-major [layers, blocks,
    heads, 2, block size, D]."""
    size = bench.size
    first = (
        (layers, num_blocks, size.kv_heads) if layer_major else (num_blocks, size.kv_heads, layers)
    )
    shape = (*first, 2, size.block_size, size.head_dim)
    return torch.empty(shape, dtype=torch.bfloat16, device=bench.device).normal_()


def measure_attention(bench: Bench, *, layer_major: bool) -> None:
    """Both attentions in one layout, layer after layer as in a model; packing for a transfer. Run
    after `measure_model`, it uses the tiles that the server has chosen."""
    size, device = bench.size, bench.device
    name = "layer-major" if layer_major else "block-major"
    width = -(-size.attention_context // size.block_size)
    num_blocks = size.batch * width
    token_bytes = 2 * size.kv_heads * size.head_dim * 2
    layer_bytes = num_blocks * size.block_size * token_bytes
    layers = size.layers
    if device.type == "cuda":
        layers = min(layers, int(torch.cuda.mem_get_info(device)[0] * 0.8) // layer_bytes)
    pool = paged_pool(bench, layer_major=layer_major, num_blocks=num_blocks, layers=layers)
    views = [pool[i] if layer_major else layer_of(pool, i) for i in range(layers)]
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(size.batch, width)
    lens = torch.full((size.batch,), size.attention_context, dtype=torch.int32, device=device)
    queries = torch.randn(
        size.batch, size.heads, size.head_dim, dtype=torch.bfloat16, device=device
    )
    splits = choose_splits(
        size.batch, size.kv_heads, max_model_len(size), num_multiprocessors(device)
    )

    def decode() -> None:
        for layer_kv in views:
            decode_attention(queries, layer_kv, tables, lens, splits=splits)

    read = size.batch * size.attention_context * token_bytes
    what = f"decode attention, {size.batch} x {size.attention_context}, {name}"
    goal = 0.85 if not layer_major else None
    bench.add(what, read / bench.bytes_per_s, bench.seconds(decode) / layers, goal)

    for prefix in (0, size.attention_context // 2):
        num_tokens = size.attention_context - prefix
        shape = (num_tokens, size.heads, size.head_dim)
        chunk = torch.randn(shape, dtype=torch.bfloat16, device=device)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)

        def prefill(chunk: torch.Tensor = chunk, starts: torch.Tensor = starts) -> None:
            prefill_attention(chunk, views[0], tables[:1], lens[:1], starts)

        what = f"prefill attention, {num_tokens} after {prefix}, {name}"
        floor_s = bench.seconds(sdpa_of(bench, num_tokens, prefix))
        bench.add(f"{what} (floor: SDPA)", floor_s, bench.seconds(prefill), None if prefix else 0.8)

    ids = torch.randperm(num_blocks, device=device)[: size.packed_blocks]
    moved = 2 * len(ids) * size.block_size * token_bytes * layers
    packed = pack_spans if layer_major else pack
    what = f"pack {len(ids)} blocks of {layers} layers, {name}"
    bench.add(what, moved / bench.bytes_per_s, bench.seconds(lambda: packed(pool, ids)))


def sdpa_of(bench: Bench, num_tokens: int, prefix: int) -> Callable[[], object]:
    """Returns torch's attention over the same numbers of queries and keys, contiguous and not
    paged."""
    size = bench.size
    shapes = ((size.heads, num_tokens), *[(size.kv_heads, prefix + num_tokens)] * 2)
    q, k, v = (
        torch.randn(1, *shape, size.head_dim, dtype=torch.bfloat16, device=bench.device)
        for shape in shapes
    )
    if prefix == 0:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(num_tokens, prefix + num_tokens)
    group = size.heads // size.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def measure_steps(bench: Bench, steps: TritonSteps, pools: list[KvPool]) -> None:
    size = bench.size
    width = pools[0].layout.num_blocks // size.batch
    weights = weight_bytes(size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(size.batch)]
    slices = [SequenceSlice([7], size.step_context, table, True) for table in tables]
    draws = [GREEDY] * size.batch
    sampled = [Draw(0.8, 50, 0.95, 0.0, seed=i, position=9) for i in range(size.batch)]
    token_bytes = 2 * size.kv_heads * size.head_dim * 2 * size.layers
    floor_s = (weights + size.batch * size.step_context * token_bytes) / bench.bytes_per_s
    what = f"decode step, {size.batch} x {size.step_context}"

    def step(batch: StepBatch, draws: list[Draw]) -> None:
        steps.sample(steps.forward(batch, pools), draws)

    batch = StepBatch(slices)
    greedy_s = bench.wall_seconds(lambda: step(batch, draws), size.repeats)
    bench.add(f"{what}, greedy", floor_s, greedy_s, goal=0.75)
    sampled_s = bench.wall_seconds(lambda: step(batch, sampled), size.repeats)
    bench.add(f"{what}, top-k 50, top-p 0.95", floor_s, sampled_s)
    kernels_s = bench.seconds(lambda: steps.forward(batch, pools))
    bench.add(f"{what}, without sampling and waiting", floor_s, kernels_s)
    one_s = bench.wall_seconds(lambda: step(StepBatch(slices[:1]), draws[:1]), size.repeats)
    floor_s = (weights + size.step_context * token_bytes) / bench.bytes_per_s
    bench.add(f"decode step, 1 x {size.step_context}", floor_s, one_s)

    per_token = 2 * (weights // 2 - size.vocab * size.hidden)
    for num_tokens in size.chunks:
        piece = SequenceSlice(
            [7] * num_tokens, num_tokens, list(range(pools[0].layout.num_blocks)), True
        )
        chunk = StepBatch([piece])
        attention = 2 * num_tokens**2 * size.heads * size.head_dim * size.layers
        floor_s = (per_token * num_tokens + attention) / bench.flop_per_s
        measured_s = bench.wall_seconds(lambda chunk=chunk: step(chunk, draws[:1]), size.repeats)
        goal = 0.6 if num_tokens == size.chunks[-1] else None
        bench.add(f"prefill of {num_tokens} tokens in one chunk", floor_s, measured_s, goal)


def generate(bench: Bench, steps: TritonSteps, pools: list[KvPool]) -> None:
    """The peer's job on our steps: all prompts in chunks, then all decode together."""
    size = bench.size
    width = -(-(size.prompt + size.made) // size.block_size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(size.batch)]
    last = [7] * size.batch
    per_step = max(1, size.chunks[-1] // size.prompt)
    for first in range(0, size.batch, per_step):
        rows = range(first, min(first + per_step, size.batch))
        prompts = [SequenceSlice([7] * size.prompt, size.prompt, tables[i], True) for i in rows]
        logits = steps.forward(StepBatch(prompts), pools)
        last[rows.start : rows.stop] = steps.sample(logits, [GREEDY] * len(rows))
    for made in range(1, size.made):
        slices = [
            SequenceSlice([token], size.prompt + made, table, True)
            for token, table in zip(last, tables, strict=True)
        ]
        last = steps.sample(steps.forward(StepBatch(slices), pools), [GREEDY] * size.batch)


def run(size: Size, device: torch.device, *, with_peer: bool) -> list[dict[str, Any]]:
    bench = Bench(size, device)
    config, weights = make_weights(size, device)
    ours_s = 0.0
    # The server's start tunes the kernels, so it runs before any kernel is measured.
    with bench.part("steps"):
        ours_s = measure_model(bench, config, weights)
    tuned_by_server = choices()
    for layer_major in (False, True):
        with bench.part(f"attention, {'layer' if layer_major else 'block'}-major"):
            measure_attention(bench, layer_major=layer_major)
            if choices() != tuned_by_server:
                raise RuntimeError(
                    "the benchmark ran a kernel in a form that the server never runs"
                )
    if with_peer:
        with bench.part("transformers' continuous batching", torch.no_grad):
            peer_s = generate_with_transformers(size, config, weights, device)
            what = f"{size.batch} x ({size.prompt} + {size.made}) tokens (floor: transformers)"
            bench.add(what, peer_s, ours_s)
    print(f"{time.monotonic() - bench.began:.0f} s in all")
    return bench.rows


def max_model_len(size: Size) -> int:
    """The longest context of the measured steps. The number of ranges of decode depends on it."""
    return max(_longest_decode(size), size.chunks[-1])


def _longest_decode(size: Size) -> int:
    return max(size.step_context, size.prompt + size.made)


def measure_model(bench: Bench, config: ModelConfig, weights: ModelWeights) -> float:
    """All steps; answers the seconds of the peer's job."""
    size = bench.size
    longest = _longest_decode(size)
    num_blocks = max(
        size.batch * -(-longest // size.block_size), -(-size.chunks[-1] // size.block_size)
    )
    layout = BlockLayout(
        num_blocks, size.kv_heads, size.layers, size.block_size, size.head_dim, "bfloat16"
    )
    kv = paged_pool(bench, layer_major=False, num_blocks=num_blocks, layers=size.layers)
    pools = [make_pool(kv.view(num_blocks, -1).view(torch.uint8), layout)]
    steps = TritonSteps(
        config,
        weights,
        max_num_seqs=size.batch,
        max_model_len=max_model_len(size),
        step_tokens=default_step_tokens(bench.device),
    )
    steps.prepare(pools)
    measure_steps(bench, steps, pools)
    with bench.part("tiers"):
        measure_tiers(bench, steps, pools)
    seconds = bench.wall_seconds(lambda: generate(bench, steps, pools), 1)
    print(f"ours: {size.batch * size.made / seconds:,.0f} tokens/s")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, nothing written")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device; --smoke runs tiny shapes in Triton's interpreter")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SMOKE if options.smoke else LLAMA_3_8B
    rows = run(size, device, with_peer=not options.no_peer)
    if options.smoke:
        sys.exit(any("error" in row for row in rows))
    card = torch.cuda.get_device_name(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    result = {"device": card, "versions": versions, "size": asdict(size), "rows": rows}
    result["tuned"] = choices()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
