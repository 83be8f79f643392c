"""The repository's documents, and the two ways to test a command in them.

run      on a real cluster, or on this machine (tests/e2e/test_documents.py)
checked  its files exist and its options are known to the program (tests/unit/docs), if a run would
         need Kubernetes, a GPU, the package index or more than a minute

A command in neither group fails the tests, because `check` does not know its program.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.harness.chart import Object, chart, load_objects, values_of

ROOT = Path(__file__).parents[2]
# languages of fenced blocks: commands, Python programs (run by tests/service/test_wheel.py), and
# everything else
SHELL = "sh"
PYTHON = "python"
OUTPUT = "text"
_OF_CLUSTER = ("chat", "status", "scale", "drain", "reset-prefix-cache", "index")
_SOURCES = ("services", "kernels", "benchmarks", "tests")


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block: its language, its text, and the line number of its first line."""

    language: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page, joined to one line."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text[:60]}"

    @property
    def variables(self) -> list[str]:
        """Variables that are assigned before the program or by `export`."""
        assigned = re.match(r"(export )?([A-Z_]+=\S+\s+)*", f"{self.text} ")
        return re.findall(r"\b([A-Z_]+)=", assigned[0] if assigned else "")

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without the path of the virtual environment."""
        words = shlex.split(self.text, comments=True)
        while len(words) > 1 and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return [words[0].removeprefix(".venv/bin/"), *words[1:]]

    @property
    def needs_cluster(self) -> bool:
        """True if the command is run against the cluster that `make up` starts."""
        match self.words:
            case ["curl", *_]:
                return True
            case ["tandem", command, *_]:
                return command in _OF_CLUSTER
        return False

    @property
    def is_run(self) -> bool:
        return (
            self.needs_cluster or self.text == "make up" or self.words[:2] == ["tandem", "simulate"]
        )


def pages() -> list[Path]:
    """Lists every Markdown file of the repository."""
    names = (p.name for p in ROOT.iterdir() if p.is_dir())
    folders = [ROOT / n for n in names if not n.startswith(".") or n == ".github"]
    found = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sorted(p for p in found if not {"build", "dist"} & set(p.relative_to(ROOT).parts))


@cache
def tokens(page: Path) -> list[Token]:
    """Parses a page as CommonMark with tables. Inline tokens follow the block that contains
    them."""
    blocks = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [t for block in blocks for t in (block, *(block.children or ()))]


def fences(page: Path) -> Iterator[Fence]:
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            yield Fence(token.info, token.content, token.map[0] + 2)


def commands() -> list[Command]:
    """Lists all commands of all pages, those of the README first."""
    first = ROOT / "README.md"
    ordered = [first, *(p for p in pages() if p != first)]
    found: list[Command] = []
    for page in ordered:
        for fence in fences(page):
            if fence.language == SHELL:
                name = str(page.relative_to(ROOT))
                whole = re.sub(r"\\\n\s*", " ", fence.text)
                lines = [line for line in whole.splitlines() if line and line[0] != "#"]
                found += [Command(name, fence.line, line) for line in lines]
    return found


def check(command: Command) -> None:
    """Raises AssertionError if a file or an option does not exist, or the program is unknown."""
    for variable in command.variables:
        assert re.search(rf"\b{variable}\b", _sources()), f"nothing reads {variable}"
    match command.words:
        case ["export", *_]:
            pass
        case ["tandem", *arguments]:
            _check_tandem(arguments)
        case ["make", *arguments]:
            _check_make(arguments)
        case [".ci/run"]:
            assert os.access(ROOT / ".ci" / "run", os.X_OK)
        case ["pytest", *arguments] | ["python", "-m", "pytest", *arguments]:
            _check_pytest(arguments)
        case ["pip", *arguments] | ["python", "-m", "pip", *arguments]:
            _check_pip(arguments)
        case ["uvx", "--constraints", file, "--from", _, "tandem", *arguments]:
            assert (ROOT / file).exists()
            _check_tandem(arguments)
        case ["python", "-m", "venv", folder]:
            assert any(folder in c.text for c in commands() if c != command), "nothing uses it"
        case [pip, *arguments] if pip.endswith("/bin/pip"):
            _check_pip(arguments)
        case [tool, *arguments] if tool.endswith(("/bin/aiperf", "/bin/guidellm")):
            _check_script("benchmarks/tandem_bench/serve_tools.py", arguments)
        case ["python", "-c", code]:
            subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        case ["python", "-m", module, *arguments]:
            path = module.replace(".", "/")
            is_package = (ROOT / path).is_dir()
            _check_script(f"{path}/__main__.py" if is_package else f"{path}.py", arguments)
        case ["python", script, *arguments]:
            _check_script(script, arguments)
        case ["docker", "build", *arguments]:
            _check_docker_build(arguments)
        case ["docker", "push", image]:
            assert image in _built_images(), f"no command builds {image}"
        case ["helm", "package", folder]:
            assert (ROOT / folder / "Chart.yaml").exists()
        case ["helm", "push", archive, address]:
            assert archive == f"{chart().name}-{chart().version}.tgz"
            assert address.startswith("oci://")
        case ["helm", "install", release, address, "--version", version, *arguments] if (
            address.startswith("oci://")
        ):
            assert (address.rpartition("/")[2], version) == (chart().name, chart().version)
            assert _install(release, arguments=arguments)
        case ["helm", "install", release, folder, *arguments]:
            assert _install(release, folder, arguments)
        case ["helm", "upgrade", release, folder, "--reuse-values", *arguments]:
            assert _install(release, folder, arguments)
        case ["kubectl", "create", "secret", "generic", _, from_file]:
            made = from_file.removeprefix("--from-file=")
            assert any(made in command.words for command in commands()), f"nothing makes {made}"
        case ["helm", "test", release, *_]:
            hooks = [o["metadata"].get("annotations", {}) for o in _install(release)]
            assert any(hook.get("helm.sh/hook") == "test" for hook in hooks)
        case ["kubectl", "-n", _, "exec", target, "--", *inside]:
            installed = {f"{o['kind']}/{o['metadata']['name']}".lower() for o in _install("tandem")}
            assert target in installed, f"the chart makes no {target}"
            # `tandem` may follow env NAME=VALUE
            _check_tandem(inside[inside.index("tandem") + 1 :])
        case ["kubectl", "-n", _, "scale", "statefulset", name, _] | [
            "kubectl",
            "-n",
            _,
            "rollout",
            "status",
            "statefulset",
            name,
        ]:
            sets = [o["metadata"]["name"] for o in _install("tandem") if o["kind"] == "StatefulSet"]
            assert name in sets, f"the chart makes no {name}"
        case ["kubectl", "-n", _, "port-forward", target, ports]:
            _check_port_forward(target, int(ports.partition(":")[2]))
        case _:
            raise AssertionError(f"no test runs or checks {command.text!r}; see {__file__}")


def options_of(*subcommand: str) -> set[str]:
    """Lists the options in the output of `tandem SUBCOMMAND --help`."""
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", _help(*subcommand)))


@cache
def _help(*subcommand: str) -> str:
    flag = "--help-all" if subcommand in (("up",), ("serve",), ("config", "show")) else "--help"
    shown = subprocess.run(
        [sys.executable, "-m", "tandem.ops.cli", *subcommand, flag],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "300", "TANDEM_DEV": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, f"tandem {' '.join(subcommand)}: {shown.stderr}"
    return shown.stdout


@cache
def _sources() -> str:
    """The text of all Python files except the tests of documents."""
    files = (p for folder in _SOURCES for p in (ROOT / folder).rglob("*.py"))
    return "\n".join(p.read_text() for p in files if p.parent != ROOT / "tests" / "unit" / "docs")


def source_has(name: str) -> bool:
    """Says whether any source contains the name as a complete word."""
    text = _sources()
    # faster than a pattern with a look-behind, which is tried at every position
    at = text.find(name)
    while at >= 0:
        end = at + len(name)
        if not re.search(r"\w", text[max(0, at - 1) : at] + text[end : end + 1]):
            return True
        at = text.find(name, at + 1)
    return False


def _named_options(arguments: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}


def _check_tandem(arguments: list[str]) -> None:
    named = _named_options(arguments)
    if arguments[0] == "bench":  # its programs take seconds each, because they load torch
        assert arguments[1] in _help("bench").split()
        unknown = {option for option in named if not source_has(option[2:].replace("-", "_"))}
    else:
        is_group = arguments[0] in ("config", "index", "keys")
        unknown = named - options_of(*arguments[: 1 + is_group])
    assert not unknown, f"tandem {arguments[0]} has no {unknown}"


def _check_make(arguments: list[str]) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for argument in arguments:
        if argument.startswith("ARGS="):
            _check_pytest(shlex.split(argument.removeprefix("ARGS=")))


def _check_pytest(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {m.partition(":")[0] for m in project["tool"]["pytest"]["ini_options"]["markers"]}
    given = iter(arguments)
    for word in given:
        if word == "-m":
            assert set(re.findall(r"\w+", next(given))) - {"and", "or", "not"} <= markers
        elif word == "-s":
            pass
        else:
            path = next(given) if word == "--confcutdir" else word
            assert (ROOT / path).exists(), f"there is no {path}"


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        if named := re.fullmatch(r"([\w-]+)\[(.*)\]", word):
            assert named[1] == project["name"]
            assert set(named[2].split(",")) <= set(project["optional-dependencies"])
    assert arguments[0] in ("install", "wheel")


def _check_script(script: str, arguments: list[str]) -> None:
    text = (ROOT / script).read_text()
    missing = [
        option
        for option in _named_options(arguments)
        if option.startswith("--")
        and f'"{option}"' not in text
        and not re.search(rf"^    {option[2:].replace('-', '_')}: ", text, re.MULTILINE)
    ]
    assert not missing, f"{script} has no {missing}"


def _check_docker_build(arguments: list[str]) -> None:
    given = dict(itertools.pairwise(arguments))
    text = (ROOT / given["-f"]).read_text()
    if target := given.get("--target"):
        assert re.search(rf"^FROM .* AS {target}$", text, re.MULTILINE), f"it has no {target}"
    if setting := given.get("--build-arg"):
        name = setting.partition("=")[0]
        assert re.search(rf"^ARG {name}\b", text, re.MULTILINE), f"it has no ARG {name}"


def _built_images() -> set[str]:
    """Lists the image tags that commands of the pages build."""
    builds = [c.words for c in commands() if c.words[:2] == ["docker", "build"]]
    return {words[words.index("-t") + 1] for words in builds if "-t" in words}


def _check_port_forward(target: str, port: int) -> None:
    kind, _, name = target.partition("/")
    services = {o["metadata"]["name"]: o for o in _install("tandem") if o["kind"] == "Service"}
    assert kind == "service"
    assert name in services, f"the chart makes no {target}"
    ports = [p["port"] for p in services[name]["spec"]["ports"]]
    assert port in ports, f"{target} has the ports {ports}"


def _install(
    release: str, folder: str = "helm/tandem", arguments: Sequence[str] = ()
) -> list[Object]:
    """Renders the objects that `helm install` would create. Raises HelmError for an unknown
    value."""
    assert (ROOT / folder / "Chart.yaml").exists()
    pairs = list(itertools.pairwise(arguments))
    values = next((values_of(ROOT / path) for option, path in pairs if option == "-f"), {})
    for option, setting in pairs:
        if option == "--set":
            path, _, text = setting.partition("=")
            *outer, last = path.split(".")
            level = values
            for key in outer:
                level = level.setdefault(key, {})
            level[last] = text
    return load_objects(chart().render(values, name=release, namespace=release))
