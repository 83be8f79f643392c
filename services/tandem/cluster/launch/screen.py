"""Prints the output of `tandem up`: a line for each started part, then a summary of at most 15
lines. The lines after the summary, about traffic and events, come from activity.py."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape

from tandem.cluster.launch.activity import kv_tokens
from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.pools import Member
from tandem.common.config.cluster import ROUTER_POOLS
from tandem.common.pool_sizes import sizes_in_words
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.net.store.registry import WorkerRecord

# The built-in model answers this prompt identically in bf16 and fp32, with and without cached
# blocks.
_PROMPT = "What is gravity? Explain in two sentences."


class LaunchScreen:
    """Prints lines, and shows the progress of the start on a terminal."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._console = Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._waiting: Waiting | None = None

    def say(self, text: str) -> None:
        """Prints a line, which may contain rich's markup."""
        with self.without_bars():
            self._console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/]  {text}")

    def done(self, what: str, took_s: float) -> None:
        """Prints a line for a part that has started, with its duration in seconds."""
        self.say(f"{escape(what)} [dim]({took_s:.1f} s)[/]")

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Shows the rows set by `wait_for` on a terminal during the `with` statement."""
        with Waiting() as self._waiting:
            try:
                yield
            finally:
                self._waiting = None

    def wait_for(self, *steps: ProgressRow) -> None:
        if self._waiting is not None:
            self._waiting.show(*steps)

    def without_bars(self) -> AbstractContextManager[None]:
        """Hides the progress rows during the `with` statement, so that something else can print."""
        return self._waiting.hidden() if self._waiting is not None else nullcontext()

    def show_ready(
        self,
        model: str,
        members: Sequence[Member],
        records: Sequence[WorkerRecord],
        logs: str,
        command_to_join: str = "",
        *,
        generates: bool = True,
        more: Sequence[str] = (),
    ) -> None:
        """Prints the summary. `records` are the workers' records from Redis. `generates` is False
        for a model that continues no text, such as a reranker. `more` has the names of the further
        models."""
        print_ = self._console.print
        options = self._options
        pools = Counter(m.pool for m in members if m.pool not in ROUTER_POOLS)
        workers = sizes_in_words(sorted(pools.items()))
        after = f"after {time.monotonic() - self._started:.1f} s"
        if pools["decode"] or options.listen:
            print_(f"\n[bold green]ready[/] {after} with {workers or 'no'} workers")
        else:
            print_(
                f"\n[bold yellow]started[/] {after}, but no request is served: there is no decode "
                "worker; add one with `tandem scale decode=1`"
            )
        print_(f"  model    [bold]{escape(model)}[/]{_precision(records)}")
        for name in more:
            print_(f"  model    [bold]{escape(name)}[/]")
        for line in _kernels(records):
            print_(f"  kernels  {line}")
        if num_tokens := kv_tokens(records):
            print_(f"  KV cache room for {num_tokens:,} tokens in the decode workers")
        url = escape(options.http_url)
        grpc = "off (--no-grpc)" if options.no_grpc else f"{escape(options.grpc_address)}"
        print_(f"  API      [bold]{url}/v1[/] (OpenAI), gRPC {grpc}")
        admin = escape(options.admin_url)
        print_(
            f"  admin    [bold]{admin}/[/] (live page), gRPC {escape(options.admin_grpc_address)}"
        )
        print_(f"  logs     {escape(logs)}")
        if pools["decode"] and not generates:
            print_(f"this model continues no text; {url}/v1/models lists its tasks")
        elif pools["decode"]:
            message = {"role": "user", "content": _PROMPT}
            body = {"model": model, "temperature": 0, "messages": [message]}
            api = f"{options.http_url}/v1/chat/completions"
            print_("try `tandem chat`, or:", markup=False)
            header = "-H 'Content-Type: application/json'"
            if options.admission.keys_file or options.redis_url:
                header += ' -H "Authorization: Bearer $TANDEM_API_KEY"'
            print_(f"  curl {api} {header} \\\n    -d '{json.dumps(body)}'", markup=False)
        if command_to_join:
            print_(f"join from another machine: {command_to_join}", markup=False)
        print_(
            "Ray is still starting; then workers can be added and restarted. Ctrl-C stops the "
            "cluster."
        )


def _precision(records: Sequence[WorkerRecord]) -> str:
    """Formats the data types in which the workers compute, such as ", computed in bfloat16"."""
    dtypes = sorted({r.compatibility.compute_dtype.partition("+")[0] for r in records})
    return f", computed in {escape(' and '.join(dtypes))}" if dtypes else ""


def _kernels(records: Sequence[WorkerRecord]) -> list[str]:
    """Formats a line for each kind of kernels and number of ranks. Plain torch is shown in
    yellow."""
    workers: dict[tuple[str, int], list[str]] = {}
    for record in records:
        workers.setdefault((record.kernels, record.num_ranks), []).append(record.worker_id)
    lines = []
    for (kernels, num_ranks), names in sorted(workers.items()):
        which = f", {num_ranks} ranks per worker" if num_ranks > 1 else ""
        which += f" on {', '.join(names)}" if len(workers) > 1 else ""
        if kernels == "torch":
            text = f"plain torch{which}, several times slower than compiled kernels"
            lines.append(f"[yellow]{escape(text)}; `tandem logs {names[0]}` shows why[/]")
        elif kernels:
            lines.append(escape(kernels.replace("native", "compiled C++") + which))
    return lines
