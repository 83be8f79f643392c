"""A pytest plugin that points SGLang's own tests at a running Tandem.

It takes the place of what these tests import: `popen_launch_server` starts nothing, because the
server of TANDEM_URL runs already, `get_tokenizer` reads the folder TANDEM_TOKENIZER whatever model
is named, every name of a model is TANDEM_MODEL, and each other name of SGLang is an empty stand-in.
`run_sglang.py` loads it.
"""

from __future__ import annotations

import fnmatch
import importlib.abc
import importlib.machinery
import json
import os
import sys
import unittest
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

URL = os.environ["TANDEM_URL"]
MODEL = os.environ["TANDEM_MODEL"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that do not apply."""
    reasons: dict[str, str] = json.loads(os.environ["TANDEM_NOT_APPLICABLE"])
    for item in items:
        for pattern, why in reasons.items():
            if fnmatch.fnmatchcase(item.nodeid, pattern):
                item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))


class CustomTestCase(unittest.TestCase):
    """A test case of unittest, without SGLang's repeats."""


def popen_launch_server(*_: Any, **__: Any) -> SimpleNamespace:
    """Starts nothing. Returns a process that nobody ends."""
    return SimpleNamespace(pid=0)


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """Returns transformers' tokenizer of the served model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TANDEM_TOKENIZER"])


def _other(name: str) -> Any:
    is_model = name.startswith("DEFAULT_") and "_MODEL" in name
    return MODEL if is_model else MagicMock(name=name)


# What a test may use. Each other name is the served model's or a mock, with which none can pass.
NAMES = {
    "sglang.test.test_utils": {
        "CustomTestCase": CustomTestCase,
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 0,
        "DEFAULT_URL_FOR_TEST": URL,
        "popen_launch_server": popen_launch_server,
    },
    "sglang.srt.utils": {"kill_process_tree": lambda *_: None},
    "sglang.srt.hf_transformers_utils": {"get_tokenizer": get_tokenizer},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of SGLang."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(NAMES.get(module.__name__, {}))
        module.__getattr__ = _other  # type: ignore[method-assign]


sys.meta_path.insert(0, _Finder())
