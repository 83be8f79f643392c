"""The output of `tandem up`: a line for each started part, then a summary."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.pools import Member
from tandem.common.process.progress import ProgressRow, Waiting

# The built-in model answers this prompt identically in bf16 and fp32, with and without cached
# blocks.
_PROMPT = "What is gravity? Explain in two sentences."


class LaunchScreen:
    """Shows the progress, and records the durations that `done` receives for the summary."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._console = Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        # (name of the part, its duration in seconds, its completion time in seconds since the
        # start)
        self._rows: list[tuple[str, float, float]] = []
        self._waiting: Waiting | None = None

    def say(self, text: str) -> None:
        """Prints a line, which may contain rich's markup."""
        with self.without_bars():
            self._console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/]  {text}")

    def done(self, what: str, took_s: float) -> None:
        self._rows.append((what, took_s, time.monotonic() - self._started))
        self.say(escape(what))

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Shows the rows of `wait_for` on a terminal during the `with` statement."""
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
        logs: str,
        command_to_join: str = "",
    ) -> None:
        """Prints the summary."""
        print_ = self._console.print
        url = escape(self._options.http_url)
        print_(f"\n[bold green]ready[/] after {time.monotonic() - self._started:.1f} s")
        print_(f"  model  [bold]{escape(model)}[/]")
        print_(f"  HTTP   [bold]{url}[/]  (OpenAI API under {url}/v1)")
        if self._options.no_grpc:
            print_("  gRPC   off (--no-grpc)")
        else:
            print_(f"  gRPC   [bold]{escape(self._options.grpc_address)}[/]  (tandem.v1.Inference)")
        admin = escape(self._options.admin_url)
        admin_grpc = escape(self._options.admin_grpc_address)
        print_(f"  admin  [bold]{admin}/[/]  (live page, /metrics; `tandem status`)")
        print_(f"         [bold]{admin_grpc}[/]  (gRPC, tandem.v1.Cluster)")
        print_(f"  logs   {escape(logs)}\n")
        print_(self._workers(members))
        print_()
        print_(self._times())
        print_("\ntry it:")
        message = {"role": "user", "content": _PROMPT}
        body = {"model": model, "temperature": 0, "messages": [message]}
        api = f"{self._options.http_url}/v1/chat/completions"
        header = "-H 'Content-Type: application/json'"
        print_(f"  curl {api} {header} \\\n    -d '{json.dumps(body)}'", markup=False)
        print_("  tandem chat", markup=False)
        if command_to_join:
            print_("\non another machine, with a copy of the token file:")
            print_(f"  {command_to_join}", markup=False)
        print_("\nRay is starting; scaling and restarts follow. Ctrl-C stops all of it.")

    def _workers(self, members: Sequence[Member]) -> Table:
        table = Table("worker", "role", "core", box=None, pad_edge=False)
        if any(member.gpu is not None for member in members):
            table.add_column("GPU")
        for member in members:
            core = "any" if member.core is None else str(member.core)
            gpu = [] if member.gpu is None else [str(member.gpu)]
            table.add_row(member.member_id, member.pool, core, *gpu)
        return table

    def _times(self) -> Table:
        table = Table("where the start went", box=None, pad_edge=False)
        table.add_column("took", justify="right")
        table.add_column("done at", justify="right")
        for what, took_s, at_s in self._rows:
            table.add_row(escape(what), f"{took_s:.1f} s", f"{at_s:.1f} s")
        return table
