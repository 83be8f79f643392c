"""Every command of the documents that no test runs: its program, its options and its files."""

from __future__ import annotations

import pytest
from helm_python import HelmError

from tests.harness.documents import Command, check, commands

CHECKED = [command for command in commands() if not command.is_run]


@pytest.mark.parametrize("command", CHECKED, ids=str)
def test_the_files_and_options_of_a_command_exist(command: Command) -> None:
    check(command)


def test_the_readme_starts_a_cluster_and_asks_it() -> None:
    readme = [c for c in commands() if c.page == "README.md"]
    assert [c.words[0] for c in readme[:2]] == ["make", "tandem"]
    assert all(c.is_run for c in readme)


@pytest.mark.parametrize(
    "text",
    [
        "tandem router --no-such-option",
        "tandem no-such-command",
        "make no-such-target",
        "make test ARGS='tests/no/such/folder'",
        "pytest -m nosuchmarker tests/unit",
        "python -m benchmarks.cluster.served --no-such-option",
        "pip install 'tandem-llm[no-such-extra]'",
        "docker build -f deploy/Dockerfile --build-arg NO_SUCH=1 .",
        "docker build -f deploy/Dockerfile --target no-such .",
        "docker push no-such-image:1",
        "helm install tandem helm/tandem --set image.noSuch=1",
        "helm push tandem-0.0.1.tgz oci://registry.example.com/charts",
        "helm install tandem oci://registry.example.com/charts/tandem --version 0.0.1",
        "kubectl -n tandem exec deployment/no-such -- tandem status",
        "kubectl -n tandem port-forward service/tandem-router 8000:8002",
        "kubectl -n tandem port-forward service/no-such 8000:8000",
        "kubectl -n tandem scale statefulset no-such --replicas=2",
        "kubectl -n tandem rollout status statefulset no-such",
        "NO_SUCH_VARIABLE_AT=1 pytest tests/unit",
        "frobnicate --all",
    ],
)
def test_a_wrong_command_is_found(text: str) -> None:
    with pytest.raises((AssertionError, HelmError)):
        check(Command("a page", 1, text))
