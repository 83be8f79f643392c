"""The programs that `tandem bench serve` can drive: their command lines, and what they measured.

Each is a program of its own, in an environment of its own: their requirements do not fit Tandem's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Api = Literal["chat", "completions"]
QUANTILES = (50, 90, 99)


class ToolError(Exception):
    """No program, or one whose results cannot be read. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The requests that the program is to send, and to whom."""

    url: str
    model: str
    tokenizer: str
    api: Api = "chat"
    requests: int = 100
    concurrency: int = 8
    rate: float | None = None  # requests a second that arrive at random; None: a closed loop
    input_tokens: int = 256
    output_tokens: int = 64
    dataset: Path | None = None  # JSON lines with a `text`; None: random text
    seed: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A measure over all requests that were answered, in ms."""

    mean: float
    quantiles: Mapping[int, float]  # by percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The program's results. A distribution is None if no request had that measure."""

    tool: str
    num_ok: int
    num_failed: int
    seconds: float
    output_tokens: float  # of all answers
    ttft: Distribution | None
    inter_token: Distribution | None
    latency: Distribution | None
    ttft_ms: list[float]  # of each request, as is the next one
    inter_token_ms: list[float]
    errors: list[str]  # messages, each once

    @property
    def requests_per_s(self) -> float:
        """Returns the rate of answers."""
        return self.num_ok / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Returns the rate of output tokens, of all requests together."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


class Tool(Protocol):
    """One of the programs."""

    name: str

    def arguments(self, work: Work, folder: Path) -> list[str]:
        """Returns the arguments of a run that leaves its results in `folder`. Raises ToolError for
        what the program cannot do."""

    def read(self, folder: Path) -> Measured:
        """Reads the results. Raises ToolError if they are not there or not whole."""


class AIPerf:
    """NVIDIA's AIPerf. Tokens are those of the server's `usage`."""

    name = "aiperf"

    def arguments(self, work: Work, folder: Path) -> list[str]:
        """Returns the arguments of a run that leaves its results in `folder`."""
        made = ["profile", "--model", work.model, "--url", work.url]
        made += ["--endpoint-type", work.api, "--streaming", "--use-server-token-count"]
        made += ["--tokenizer", work.tokenizer, "--request-count", str(work.requests)]
        made += ["--concurrency", str(work.concurrency), "--random-seed", str(work.seed)]
        if work.rate is not None:
            made += ["--request-rate", str(work.rate)]
        if work.dataset is None:
            made += ["--isl", str(work.input_tokens), "--osl", str(work.output_tokens)]
            made += ["--extra-inputs", "ignore_eos:true"]
        else:
            made += ["--input-file", str(work.dataset), "--custom-dataset-type", "single_turn"]
            made += ["--extra-inputs", f"max_tokens:{work.output_tokens}"]
        if work.key:
            made += ["--api-key", work.key]
        return [*made, "--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder)]

    def read(self, folder: Path) -> Measured:
        """Reads the results. Raises ToolError if they are not there or not whole."""
        told = _read(folder, "profile_export_aiperf.json")
        records = list(_lines(folder, "profile_export.jsonl"))

        def total(name: str) -> float:
            return float(told.get(name, {}).get("avg") or 0.0)

        def distribution(name: str) -> Distribution | None:
            if not (of := told.get(name)):
                return None
            return Distribution(of["avg"], {q: of[f"p{q}"] for q in QUANTILES})

        def samples(name: str) -> list[float]:
            metrics = [record.get("metrics", {}).get(name) for record in records]
            return [float(metric["value"]) for metric in metrics if metric]

        errors = told.get("error_summary") or []
        return Measured(
            tool=self.name,
            num_ok=int(total("request_count")),
            num_failed=int(total("error_request_count")),
            seconds=total("benchmark_duration"),
            output_tokens=total("total_output_tokens"),
            ttft=distribution("time_to_first_token"),
            inter_token=distribution("inter_token_latency"),
            latency=distribution("request_latency"),
            ttft_ms=samples("time_to_first_token"),
            inter_token_ms=samples("inter_token_latency"),
            errors=[str(e.get("error_details", {}).get("message", e)) for e in errors],
        )


class GuideLLM:
    """Red Hat's GuideLLM."""

    name = "guidellm"

    def arguments(self, work: Work, folder: Path) -> list[str]:
        """Returns the arguments of a run that leaves its results in `folder`."""
        given = (work.url, work.model, work.tokenizer, work.key, str(work.dataset or ""))
        if bad := next((value for value in given if "," in value), None):
            raise ToolError(f"guidellm cannot be given {bad[:80]!r}: it has a comma")
        if work.dataset is not None and work.dataset.suffix not in (".json", ".jsonl"):
            raise ToolError(f"guidellm reads a file by its name: {work.dataset} is no .jsonl")
        path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[work.api]
        backend = f"kind=openai_http,target={work.url},model={work.model},request_format={path}"
        if work.key:
            backend += f",api_key={work.key}"
        if work.rate is None:
            profile = f"kind=concurrent,streams={work.concurrency}"
        else:
            profile = f"kind=poisson,rate={work.rate},max_concurrency={work.concurrency}"
        if work.dataset is None:
            data = "kind=synthetic_text"
            data += f",prompt_tokens={work.input_tokens},output_tokens={work.output_tokens}"
        else:
            data = f"kind=json_file,path={work.dataset}"
            backend += f",max_tokens={work.output_tokens}"
        made = ["run", "--backend", backend, "--profile", profile, "--data", data]
        made += ["--constraint", f"kind=max_requests,count={work.requests}"]
        made += ["--tokenizer", f"kind=hf_auto,model={work.tokenizer}"]
        made += ["--seed", f"kind=static,value={work.seed}"]
        made += ["--output", f"kind=json,path={folder / 'guidellm.json'}"]
        return [*made, "--disable-console-interactive"]

    def read(self, folder: Path) -> Measured:
        """Reads the results. Raises ToolError if they are not there or not whole."""
        (told,) = _read(folder, "guidellm.json")["benchmarks"]
        metrics, requests = told["metrics"], told["requests"]

        def distribution(name: str, factor: float = 1.0) -> Distribution | None:
            of = metrics[name]["successful"]
            if not of or not of["count"]:
                return None
            quantiles = {q: of["percentiles"][f"p{q}"] * factor for q in QUANTILES}
            return Distribution(of["mean"] * factor, quantiles)

        def samples(name: str) -> list[float]:
            return [r[name] for r in requests["successful"] if r.get(name) is not None]

        totals = metrics["request_totals"]
        failed = [str(r["info"].get("error") or "no message") for r in requests["errored"]]
        return Measured(
            tool=self.name,
            num_ok=totals["successful"],
            num_failed=totals["errored"],
            seconds=told["duration"],
            output_tokens=metrics["output_token_count"]["successful"]["total_sum"],
            ttft=distribution("time_to_first_token_ms"),
            inter_token=distribution("inter_token_latency_ms"),
            latency=distribution("request_latency", 1000.0),
            ttft_ms=samples("time_to_first_token_ms"),
            inter_token_ms=samples("inter_token_latency_ms"),
            errors=list(dict.fromkeys(failed)),
        )


TOOLS: tuple[Tool, ...] = (AIPerf(), GuideLLM())


def find_tool(name: str = "", path: Path | None = None) -> tuple[Tool, Path]:
    """Returns a program of this name, or any, and where it is. `path` is the program itself or the
    folder of an environment that has it. Raises ToolError."""
    wanted = [tool for tool in TOOLS if name in ("", tool.name)]
    if path is None:
        for tool in wanted:
            if found := shutil.which(tool.name):
                return tool, Path(found)
    else:
        for tool in wanted:
            for program in (path, path / tool.name, path / "bin" / tool.name):
                if program.name == tool.name and program.is_file():
                    return tool, program.absolute()
    names = " or ".join(tool.name for tool in wanted)
    where = "on the PATH" if path is None else f"at {path}"
    raise ToolError(
        f"there is no {names} {where}; install one in an environment of its own: "
        f"python -m venv bench-tools && bench-tools/bin/pip install {wanted[0].name}, "
        "then add --tool-path bench-tools"
    )


def _read(folder: Path, name: str) -> Any:
    for file in folder.rglob(name):
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise ToolError(f"{file} is no JSON: {error}") from None
    raise ToolError(f"the program wrote no {name}")


def _lines(folder: Path, name: str) -> Iterator[Any]:
    for file in folder.rglob(name):
        yield from map(json.loads, file.read_text().splitlines())
