"""Tandem: LLM serving with prefill and decode on separate workers. Start at services/README.md.

The names of the Python API are loaded from `tandem.llm` only when they are first used. So a process
of a cluster that imports a package of Tandem does not load an engine.
"""

from importlib import import_module

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("tandem-llm")
    if name in __all__:
        return getattr(import_module("tandem.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
