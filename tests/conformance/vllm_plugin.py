"""A pytest plugin that points vLLM's own tests at a running Tandem.

It takes the place of what these tests import: `RemoteOpenAIServer` is the server of TANDEM_URL
instead of a process of vLLM, `get_tokenizer` reads the folder TANDEM_TOKENIZER whatever model is
named, and every other module of vLLM is an empty stand-in. `run_vllm.py` loads it.
"""

from __future__ import annotations

import base64
import fnmatch
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import openai
import pytest

URL = os.environ["TANDEM_URL"]
TIMEOUT_S = 300.0
# Options of vLLM's server that choose a feature; without it the test has nothing to test.
FEATURES = {
    "--root-path": "a path before the routes",
    "--task": "another task than generation",
    "--runner": "another task than generation",
    "--enable-prompt-embeds": "prompts as embeddings",
    "--skip-tokenizer-init": "a server without a tokenizer",
    "--return-tokens-as-token-ids": "an option of vLLM's server",
    "--enable-tokenizer-info-endpoint": "",  # only some tests of that server need it
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that do not apply."""
    reasons: dict[str, str] = json.loads(os.environ["TANDEM_NOT_APPLICABLE"])
    for item in items:
        for pattern, why in reasons.items():
            if fnmatch.fnmatchcase(item.nodeid, pattern):
                item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))


class RemoteOpenAIServer:
    """The running Tandem, with the methods that the tests call."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, arguments: list[str], **_: Any) -> None:
        """`model` is the served one already. Skips the test where `arguments` ask for a feature
        that is none of an API."""
        for argument in arguments:
            if reason := FEATURES.get(argument):
                pytest.skip(f"not applicable: {reason}")
        self.url_root = URL

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """Returns the address of a path."""
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Returns a client that waits five minutes at most."""
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Returns a client that waits five minutes at most."""
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": TIMEOUT_S, **own, **options}


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """Returns transformers' tokenizer of the served model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TANDEM_TOKENIZER"])


class Served:
    """The configuration of the served model, as far as tests read it."""

    def get_vocab_size(self) -> int:
        """Returns the size of the vocabulary."""
        config = Path(os.environ["TANDEM_TOKENIZER"]) / "config.json"
        size: int = json.loads(config.read_text())["vocab_size"]
        return size


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM; its names are mocks, which no test calls that can pass here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.transformers_utils.tokenizer":
            module.get_tokenizer = get_tokenizer  # type: ignore[attr-defined]
        if module.__name__ == "vllm.config":
            module.ModelConfig = lambda *_, **__: Served()  # type: ignore[attr-defined]
        if module.__name__ == "vllm.version":
            module.__version__ = os.environ["TANDEM_VERSION"]  # type: ignore[attr-defined]
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]


def _utils() -> ModuleType:
    utils = ModuleType("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
    return utils


sys.meta_path.insert(0, _Finder())
# A fixture loads adapters, whose tests are not run.
huggingface_hub.snapshot_download = lambda **_: ""
sys.modules["tests.utils"] = _utils()
sys.modules.setdefault("pybase64", base64)
