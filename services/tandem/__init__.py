"""Tandem: LLM serving with prefill and decode on separate workers. Start at services/README.md.

The names of the Python API are loaded from `tandem.llm` when they are used first: no process of a
cluster loads an engine because it imports a package of Tandem.
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
    if name in __all__:
        return getattr(import_module("tandem.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
