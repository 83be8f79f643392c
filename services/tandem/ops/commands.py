"""The commands of `tandem`. Each command imports its modules only when it runs, so every command
starts fast."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from tandem.common.options import TIME, by_comma, one_line
from tandem.common.printable import printable
from tandem.common.process.garbage import without_collection
from tandem.errors import TandemError

app = App(
    name="tandem",
    help="LLM serving with prefill and decode on separate workers.",
    help_format="plaintext",
    help_epilogue="`tandem COMMAND --help` shows the options of a command.",
    help_flags=("--help", "-h"),
    version=lambda: f"tandem {version('tandem-llm')}",
    version_flags="--version",
    group_arguments=Group("Arguments", sort_key=0),
    group_parameters=Group("Options", sort_key=1),
    default_parameter=Parameter(negative=(), allow_repeating=True),
)
config = App(name="config", help="Show the values of options.")
bench = App(name="bench", help="Measure a running cluster, or parts of Tandem on this machine.")
index = App(
    name="index",
    help="Check the prefix tree in Redis, which records the KV blocks of the workers.",
)
keys = App(name="keys", help="Create, list, update, rotate and revoke API keys.")
app.command(bench)
app.command(config)
app.command(index)
app.command(keys)

_HERE = "Default: the cluster of `tandem up` on this machine."
_Url = Annotated[
    str,
    Parameter(
        help=f"URL of a router's admin port, such as http://127.0.0.1:8002. {_HERE}",
        env_var="TANDEM_ADMIN_URL",
        show_default=False,
    ),
]
_AnyUrl = Annotated[
    str,
    Parameter(
        help=f"URL of a router's admin or public port, such as http://127.0.0.1:8002. {_HERE}",
        env_var="TANDEM_ADMIN_URL",
        show_default=False,
    ),
]
_Key = Annotated[str, Parameter(help="The key's id, as `tandem keys list` shows it.")]
_Worker = Annotated[
    str,
    Parameter(
        help="The worker's id, as `tandem status` shows it.", completer=lambda _: _worker_ids()
    ),
]


def _parse_models(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of an API key that are given on the command line."""

    requests_per_minute: int | None = None
    """Requests per minute of the tenant, over all routers. 0: no limit."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute of the tenant. 0: no limit."""
    max_concurrent: int | None = None
    """Requests of the tenant that may run at the same time. 0: no limit."""
    max_prompt_tokens: int | None = None
    """Largest prompt, in tokens. 0: limited only by the model's context."""
    max_completion_tokens: int | None = None
    """Largest completion, in tokens. 0: limited only by the model's context."""
    max_kv_priority: int | None = None
    """Highest kv_priority of the tenant's requests; higher values are lowered to it. 0: no
    limit."""
    weight: int | None = None
    """Share of the tenant, relative to other tenants, when requests queue: 1 to 10000. Default:
    100."""
    earliest_priority: int | None = None
    """Earliest (lowest) `priority` of the key's requests; lower values are raised to it. Default:
    no limit."""
    may_shed: bool | None = None
    """All requests of the key have their turns last while workers are busy, and are refused
    first."""
    models: Annotated[tuple[str, ...] | None, by_comma("NAME,...", _parse_models)] = None
    """Models and LoRA adapters that the key may use, such as smollm2,my-adapter. Default: all. An
    empty text: all again."""

    def given(self) -> dict[str, Any]:
        """Returns a dict with the limits that were given: name -> value."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_Limits = Annotated[KeyLimits, Parameter(name="*")]
_NO_LIMITS = KeyLimits()


def _admin(url: str) -> str:
    """Returns `url`, or else the admin address of the cluster that runs on this machine."""
    from tandem.cluster.logs.run_logs import DEFAULT_ADMIN_URL, find_address

    return url or find_address("admin", DEFAULT_ADMIN_URL)


def _worker_ids() -> list[str]:
    """Returns the ids of the workers, for shell completion."""
    from tandem.cluster.operate import call_router

    state = call_router(_admin(os.environ.get("TANDEM_ADMIN_URL", "")), "GET", deadline_s=1.0)
    return [worker["worker_id"] for worker in state["workers"]]


def _public(url: str) -> str:
    """Returns `url`, or else the public address of the cluster that runs on this machine."""
    from tandem.cluster.logs.run_logs import find_address

    return url or find_address("http", "http://127.0.0.1:8000")


@app.command
def chat(
    question: Annotated[
        str,
        Parameter(
            help="A question to answer before the command ends. Default: start a conversation.",
            show_default=False,
        ),
    ] = "",
    /,
    *,
    url: Annotated[
        str,
        Parameter(
            help=f"URL of a server with OpenAI's API, such as http://127.0.0.1:8000. {_HERE}",
            env_var="TANDEM_URL",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str,
        Parameter(
            help="Name of the model. Default: the first model that the server lists.",
            show_default=False,
        ),
    ] = "",
    system: Annotated[
        str, Parameter(help="Instructions to the model (the system message).", show_default=False)
    ] = "",
    temperature: Annotated[
        float | None, Parameter(help="Sampling temperature. Default: the model's own.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="Largest number of tokens in an answer.")
    ] = None,
) -> int:
    """Chat with a model in the terminal. /help lists the commands."""
    from rich.console import Console

    from tandem.ops.chat import Chat, run

    given = {"temperature": temperature, "max_tokens": max_tokens}
    body = {name: value for name, value in given.items() if value is not None}
    console = Console(highlight=False, soft_wrap=True)
    server = _public(url).rstrip("/").removesuffix("/v1")
    return run(Chat(server, console, model, system, body), question)


@app.command
def ps() -> None:
    """List the clusters that you run on this machine."""
    from tandem.cluster.running import show_clusters

    show_clusters()


@app.command
def status(
    *,
    watch: Annotated[
        bool, Parameter(alias="-w", help="Show the state again every 2 s, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="Print the state as JSON.")] = False,
    url: _Url = "",
) -> None:
    """Show pools, workers, load, KV use and transports."""
    from tandem.cluster.operate import show_status, watch_status

    if watch:
        watch_status(_admin(url))
    else:
        show_status(_admin(url), as_json=as_json)


@app.command
def scale(
    size: Annotated[
        str,
        Parameter(
            name="POOL=SIZE", help="A pool and its new number of workers, such as prefill=2."
        ),
    ],
    /,
    *sizes: Annotated[str, Parameter(show=False)],
    url: _Url = "",
    deadline: Annotated[
        float, TIME, Parameter(help="Longest wait until the sizes are reached.")
    ] = 60.0,
) -> None:
    """Set pool sizes, such as prefill=2 decode=1, and wait until they are reached."""
    from tandem.cluster.operate import scale_pools

    scale_pools(_admin(url), (size, *sizes), deadline_s=deadline)


@app.command(alias="flip")  # the earlier name `flip` still works
def set_role(
    worker: _Worker,
    /,
    *,
    role: Annotated[
        str,
        Parameter(
            help=(
                "New pool of the worker: prefill or decode. Default: the pool in which it is not."
            ),
            show_default=False,
        ),
    ] = "",
    url: _Url = "",
) -> None:
    """Switch a running worker to the other pool, or back, without a restart."""
    from tandem.cluster import operate

    operate.set_role(_admin(url), worker, role)


@app.command
def drain(
    worker: _Worker,
    /,
    *,
    url: _Url = "",
    deadline: Annotated[
        float, TIME, Parameter(help="Time that the worker's requests have to finish or move.")
    ] = 30.0,
    force: Annotated[bool, Parameter(help="Drain even the last decode worker.")] = False,
) -> None:
    """Drain a worker: its requests finish or move to other workers, then its process ends.

    A new worker replaces it. To make a pool smaller, use `tandem scale`.
    """
    from tandem.cluster.operate import drain_worker

    drain_worker(_admin(url), worker, deadline_s=deadline, force=force)


@app.command
def reset_prefix_cache(
    worker: Annotated[
        str,
        Parameter(
            help="The worker's id. Default: all workers.",
            completer=lambda _: _worker_ids(),
            show_default=False,
        ),
    ] = "",
    /,
    *,
    url: _Url = "",
) -> None:
    """Drop cached KV blocks that no request uses, on all workers or on one."""
    from tandem.cluster import operate

    operate.reset_prefix_cache(_admin(url), worker)


@app.command
def audit(
    *,
    limit: Annotated[int, Parameter(help="Largest number of entries, at most 1000.")] = 50,
    url: _Url = "",
) -> None:
    """Show the latest refused calls and operators' changes, newest last."""
    from tandem.cluster.operate import show_audit

    show_audit(_admin(url), limit)


@app.command
def why(
    request: Annotated[str, Parameter(help="Id of the request or its reply, or its X-Request-Id.")],
    /,
    *,
    url: _AnyUrl = "",
) -> None:
    """Show what a request waited for, and why its workers were chosen."""
    from tandem.cluster.operate import show_why

    show_why(_admin(url), request)


@app.command
def logs(
    worker: Annotated[
        str,
        Parameter(
            help="Id of a worker or router, such as decode-0. Default: list the names.",
            completer=lambda _: _worker_ids(),
            show_default=False,
        ),
    ] = "",
    /,
    *,
    follow: Annotated[
        bool, Parameter(alias="-f", help="Continue with new lines as they come.")
    ] = False,
    url: _Url = "",
) -> None:
    """Show the log of a process of `tandem up` on this machine, also after its end.

    A router fetches the log of a worker on another machine, while that worker answers.
    """
    from tandem.cluster.logs.worker_log import show_names, show_worker_log

    if worker:
        show_worker_log(url, worker, follow=follow)
    else:
        show_names(url)


@app.command
def events(
    *,
    limit: Annotated[int, Parameter(help="Largest number of events, at most 1000.")] = 50,
    url: _Url = "",
) -> None:
    """Show events of workers and requests, and changes by operators, newest last."""
    from tandem.cluster.operate import show_events

    show_events(_admin(url), limit)


@index.command
def verify(
    *,
    url: _Url = "",
    everything: Annotated[
        bool, Parameter(name="--all", help="Check all entries of each worker instead of a sample.")
    ] = False,
) -> int:
    """Compare the prefix tree with the workers' blocks. Exit status 1: they differ."""
    from tandem.cluster.operate import verify_index

    return 0 if verify_index(_admin(url), everything=everything) else 1


@app.command
def usage(
    *,
    window: Annotated[
        Literal["day", "minute"], Parameter(help="Whether to count by day or by minute (UTC).")
    ] = "day",
    last: Annotated[int, Parameter(help="Number of days or minutes to show.")] = 7,
    tenant: Annotated[
        str | None,
        Parameter(
            help=(
                "Show only this tenant. Default: all tenants; with a key of the role user, the "
                "key's own tenant."
            )
        ),
    ] = None,
    url: _AnyUrl = "",
) -> None:
    """Show the requests and tokens of each tenant."""
    from tandem.cluster.keys import show_usage

    show_usage(_admin(url), window, last, tenant)


@keys.command
def create(
    *,
    tenant: Annotated[str, Parameter(help="Tenant of the key. Tenants share no KV cache.")],
    role: Annotated[
        Literal["user", "operator", "metrics"],
        Parameter(
            help=(
                "Calls that the key allows. user: requests to the models. operator: all calls. "
                "metrics: only metrics."
            )
        ),
    ] = "user",
    expires: Annotated[
        str, Parameter(help="Time until the key expires, such as 30d. 0: never.")
    ] = "0",
    file: Annotated[
        Path | None,
        Parameter(
            help=(
                "Add the key to this JSON file for `--keys-file`, instead of sending it to a "
                "router."
            )
        ),
    ] = None,
    limits: _Limits = _NO_LIMITS,
    url: _Url = "",
) -> None:
    """Create an API key and print it. The secret is shown only once."""
    from tandem.cluster.keys import add_key, create_key

    if file is None:
        create_key(_admin(url), tenant, role, expires, limits.given())
    else:
        add_key(file, tenant, role, expires, limits.given())


@keys.command(name="list")
def list_(*, url: _Url = "") -> None:
    """Show all keys, without their secrets."""
    from tandem.cluster.keys import list_keys

    list_keys(_admin(url))


@keys.command
def update(key_id: _Key, /, *, limits: _Limits = _NO_LIMITS, url: _Url = "") -> None:
    """Change limits of an API key. Limits that are not named stay the same."""
    from tandem.cluster.keys import update_key

    update_key(_admin(url), key_id, limits.given())


@keys.command
def rotate(
    key_id: _Key,
    /,
    *,
    grace: Annotated[str, Parameter(help="Time that the old secret still works.")] = "1h",
    url: _Url = "",
) -> None:
    """Replace the secret of an API key and print the new one."""
    from tandem.cluster.keys import rotate_key

    rotate_key(_admin(url), key_id, grace)


@keys.command
def revoke(key_id: _Key, /, *, url: _Url = "") -> int:
    """Revoke an API key permanently. Exit status 1: some routers did not confirm it."""
    from tandem.cluster.keys import revoke_key

    return 0 if revoke_key(_admin(url), key_id) else 1


@app.command
def pull(
    model: Annotated[str, Parameter(help="A model of the Hugging Face hub, or smollm2.")],
    /,
    *,
    revision: Annotated[
        str, Parameter(help="Branch, tag or commit. Default: main.", show_default=False)
    ] = "",
) -> None:
    """Download a model and check it, so that a later start needs no network."""
    from tandem.cluster.launch.checked_model import fetch_model
    from tandem.cluster.launch.options import LaunchOptions

    found = fetch_model(LaunchOptions(model=model, model_revision=revision), print)
    print(f"{found.name} is in {found.path}")


def up(*arguments: str) -> int:
    from tandem.cluster.launch.options import LaunchOptions
    from tandem.common.config.more_models import with_all_models
    from tandem.common.option_sources import read_from_sources

    if arguments and not arguments[0].startswith("-"):
        arguments = ("--model", *arguments)
    options = read_from_sources(LaunchOptions, "tandem up", with_all_models(arguments)).settings
    with without_collection():
        from tandem.cluster.launch.launcher import up as launch

    return launch(options)


def join(*arguments: str) -> int:
    from tandem.cluster.launch.joined_host import JoinOptions
    from tandem.common.option_sources import read_from_sources

    if arguments and not arguments[0].startswith("-"):
        arguments = ("--address", *arguments)
    options = read_from_sources(JoinOptions, "tandem join", arguments).settings
    from tandem.cluster.launch.joined_host import join as run_host

    return run_host(options)


def show_config(*arguments: str) -> int:
    from tandem.cluster.launch.config_show import show_config as show

    show(arguments)
    return 0


def controller(*arguments: str) -> int:
    from tandem.cluster.launch.controller import ControllerOptions, run
    from tandem.common.options import read

    return run(read(ControllerOptions, "tandem controller", arguments))


def program(module: str, *, is_service: bool = False) -> Callable[..., NoReturn]:
    """Returns a command that runs the program `python -m module` in place of this process. So
    signals reach the program directly.

    `is_service`: True if the program handles SIGTERM and SIGINT itself. The command exits with an
    error if the module's package is not installed.
    """
    start = ["-m", module] if is_service else ["-m", "tandem.common.process.early_end", module]

    def become(*arguments: str) -> NoReturn:
        if find_spec(module.split(".")[0]) is None:
            sys.exit("tandem: the benchmarks are not installed: pip install 'tandem-llm[bench]'")
        os.execv(sys.executable, [sys.executable, *start, *arguments])

    return become


# Words of the command line -> program. Each program parses its arguments itself, including --help,
# because cyclopts would drop empty arguments. The cyclopts app only lists the programs in its help.
PROGRAMS: dict[tuple[str, ...], Callable[..., int]] = {}
for words, start, text in (
    ("up", up, "Start a cluster on this machine; `up MODEL` names a model"),
    ("serve", up, "Start a cluster on this machine, as `up` does"),
    ("join", join, "Make this machine a host of a cluster; Ctrl-C makes it leave cleanly"),
    ("config show", show_config, "Show the options of `up`, and where their values come from"),
    ("controller", controller, "Run the pool controller on an existing Ray cluster"),
    (
        "doctor",
        program("tandem.ops.doctor"),
        "Check this host, and show the effect of each problem and its remedy",
    ),
    ("simulate", program("tandem.ops.simulator"), "Replay a trace on simulated workers"),
    (
        "kv-size",
        program("tandem.ops.kv_size"),
        "Compute how much memory a model's KV takes, and how many workers a load needs",
    ),
    (
        "completion",
        program("tandem.ops.completion"),
        "Print the script with which a shell completes commands",
    ),
    ("router", program("tandem.router", is_service=True), "Run one router"),
    ("worker", program("tandem.worker", is_service=True), "Run one worker"),
    (
        "redis-front",
        program("tandem.net.security.redis_front", is_service=True),
        "Run a TLS proxy in front of a Redis server",
    ),
    (
        "bench transfer",
        program("tandem_bench.transfer"),
        "Compare KV transfers over NIXL and gRPC with raw transfers over each",
    ),
    ("bench index", program("tandem_bench.index"), "Time the prefix tree in Redis"),
    ("bench engine", program("tandem_bench.engine"), "Time prefill and decode of the model"),
    ("bench perplexity", program("tandem_bench.perplexity"), "Compare the quality of KV formats"),
    ("bench serve", program("tandem_bench.serve"), "Measure a cluster with AIPerf or GuideLLM"),
    ("bench stages", program("tandem_bench.engine_stages"), "Time the stages of a model's step"),
):
    *group, name = words.split()
    (app[group[0]] if group else app).command(start, name=name, help=f"{text}.")
    PROGRAMS[*group, name] = start

# The groups of commands in `tandem --help`, in the order in which people need them.
for place, (title, names) in enumerate(
    {
        "Start": "up serve chat pull join",
        "Inspect": "ps status why logs events usage audit",
        "Change": "scale set-role drain reset-prefix-cache keys index",
        "Prepare": "doctor config kv-size simulate bench completion",
        "Parts of a cluster": "router worker controller redis-front",
        "Options": "--help --version",
    }.items()
):
    group_ = Group(title, sort_key=place)
    for order, name in enumerate(names.split()):
        app[name].group = group_
        app[name].sort_key = order


def run() -> None:
    """Runs the command that the command line names, and exits."""
    words = sys.argv[1:]
    try:
        for length in (1, 2):
            if start := PROGRAMS.get(tuple(words[:length])):
                sys.exit(start(*words[length:]))
        app(exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print(f"{_named(words)}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except TandemError as error:
        sys.exit(f"tandem: {printable(error.message, keep=chr(10))}")
    except OSError as error:
        from tandem.models.files import DISK_FULL

        if error.errno not in DISK_FULL:
            raise
        sys.exit(
            f"tandem: a disk is full ({error}); free some space, or name folders on another disk "
            "in the variables TMPDIR, XDG_STATE_HOME and TANDEM_CACHE_DIR. `tandem doctor` names "
            "the full disk"
        )


def _named(words: list[str]) -> str:
    """Returns the name of the command, such as `tandem keys create`, for error messages."""
    command = app
    names = ["tandem"]
    for word in words[:2]:
        if word.startswith("-") or word not in command:
            break
        command = command[word]
        names.append(word)
    return " ".join(names)
