"""`tandem bench serve`, as a command of its own: `python -m tandem_bench.serve`.

It measures a running cluster through its public HTTP port with a program that others keep, AIPerf
or GuideLLM, and ends with one table and one plot, whichever program it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import httpx
from cyclopts import Parameter, run
from cyclopts.validators import Number
from rich.console import Console

from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import TandemError
from tandem_bench.serve_report import plot, show
from tandem_bench.serve_tools import Api, Measured, Tool, ToolError, Work, find_tool

_KEY_VARIABLE = "TANDEM_API_KEY"
_END_S = 10.0
_LOG_LINES = 15
_Positive = Number(gte=1)


def main(
    *,
    url: Annotated[str, Parameter(help="Public HTTP address.")] = "http://127.0.0.1:8000",
    tool: Annotated[
        Literal["", "aiperf", "guidellm"],
        Parameter(help="Program that sends the requests. Default: the first one there is."),
    ] = "",
    tool_path: Annotated[
        Path | None,
        Parameter(help="The program, or the environment that has it. Default: from the PATH."),
    ] = None,
    api: Annotated[Api, Parameter(help="API to call.")] = "chat",
    model: Annotated[str, Parameter(help="Model to name. Default: the served one.")] = "",
    tokenizer: Annotated[
        str,
        Parameter(help="Folder of the model's tokenizer. Default: of hub and built-in models."),
    ] = "",
    requests: Annotated[int, Parameter(help="Number of requests.", validator=_Positive)] = 100,
    concurrency: Annotated[
        int, Parameter(help="Requests that are open at once, at most.", validator=_Positive)
    ] = 8,
    request_rate: Annotated[
        float | None,
        Parameter(
            help="Requests a second, at random times. Default: each after the end of another.",
            validator=Number(gt=0),
        ),
    ] = None,
    input_tokens: Annotated[
        int, Parameter(help="Length of prompts of random text.", validator=_Positive)
    ] = 256,
    output_tokens: Annotated[
        int, Parameter(help="Length of answers, at most with --dataset.", validator=_Positive)
    ] = 64,
    dataset: Annotated[
        Path | None,
        Parameter(help="File of JSON lines with a `text` each, instead of random text."),
    ] = None,
    seed: Annotated[int, Parameter(help="Of the random text and times.")] = 0,
    deadline: Annotated[
        float, Parameter(help="Seconds until the program is ended.", validator=Number(gt=0))
    ] = 3600.0,
    plot_file: Annotated[
        Path | None, Parameter(name="--plot", help="PNG, SVG or PDF to write, by matplotlib.")
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="Folder for the program's own results. Default: none is kept.")
    ] = None,
) -> None:
    """Measure a running cluster with AIPerf or GuideLLM: a table and a plot.

    The API key is read from TANDEM_API_KEY.
    """
    console = Console()
    key = os.environ.get(_KEY_VARIABLE, "")
    if dataset is not None and not dataset.is_file():
        _fail(f"there is no file {dataset}")
    try:
        program = find_tool(tool, tool_path)
        served = model or _served_model(url, key)
        work = Work(
            url=url.rstrip("/"),
            model=served,
            tokenizer=tokenizer or _tokenizer_of(served),
            api=api,
            requests=requests,
            concurrency=concurrency,
            rate=request_rate,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            dataset=None if dataset is None else dataset.absolute(),
            seed=seed,
            key=key,
        )
        with ExitStack() as stack:
            folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            measured = drive(*program, work, folder.absolute(), deadline)
    except ToolError as error:
        _fail(str(error))
    title = _title(measured, work)
    show(measured, console, title)
    if plot_file is not None:
        _plot(measured, title, plot_file, console)
    if not measured.num_ok:
        _fail("no request was answered")


def drive(tool: Tool, program: Path, work: Work, folder: Path, deadline_s: float) -> Measured:
    """Runs the program, whose words go to a file of the folder. Raises ToolError if it fails."""
    log = folder / f"{tool.name}.log"
    command = [str(program), *tool.arguments(work, folder)]
    step = ProgressRow(tool.name, f"sends {work.requests} requests to {work.url}")
    with log.open("wb") as file, Waiting(step):
        # A session of its own: the program's own processes end with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ToolError(f"{tool.name} was not done in {deadline_s:.0f} s") from None
        finally:
            _end(process)
    if status:
        last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        raise ToolError("\n".join([f"{tool.name} ended with {status}:", *last]))
    return tool.read(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the program's session: first as Ctrl-C does, then at once."""
    for number, wait_s in ((signal.SIGINT, _END_S), (signal.SIGKILL, None)):
        try:
            if process.poll() is None or number == signal.SIGKILL:
                os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _served_model(url: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10)
        told: Any = answer.raise_for_status().json()
        return str(told["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        hint = f" (set {_KEY_VARIABLE})" if error.response.status_code in (401, 403) else ""
        raise ToolError(f"{url} answers {error.response.status_code}{hint}") from None
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ToolError(f"no model is served at {url}: {error}") from None


def _tokenizer_of(model: str) -> str:
    """Returns the built-in model's folder, or the name of a model of the hub."""
    from tandem.models.source import BUILT_IN, resolve

    if "/" in model:
        return model
    with suppress(TandemError):
        folder = resolve(BUILT_IN)
        if model in (BUILT_IN, folder.name):
            return str(folder.path)
    raise ToolError(f"name the folder of {model}'s tokenizer: --tokenizer FOLDER")


def _title(measured: Measured, work: Work) -> str:
    load = f"{work.concurrency} at once" if work.rate is None else f"{work.rate:g} requests/s"
    text = "from a file" if work.dataset else f"{work.input_tokens} to {work.output_tokens} tokens"
    return f"{work.model} by {measured.tool}: {work.api}, {load}, {text}"


def _plot(measured: Measured, title: str, file: Path, console: Console) -> None:
    try:
        plot(measured, title, file)
    except ImportError:
        _fail("--plot needs matplotlib: pip install 'tandem-llm[simulate]'")
    except (OSError, ValueError) as error:
        _fail(f"{file}: {error}")
    console.print(f"written to {file}")


def _fail(message: str) -> NoReturn:
    print(f"tandem bench serve: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    run(main)
