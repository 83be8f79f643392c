# isort: skip_file
__version__: str

from tandem.llm import (
    LLM as LLM,
    AsyncLLM as AsyncLLM,
    CompletionOutput as CompletionOutput,
    EmbeddingOutput as EmbeddingOutput,
    EmbeddingRequestOutput as EmbeddingRequestOutput,
    Logprob as Logprob,
    LoRARequest as LoRARequest,
    RequestOutput as RequestOutput,
    SamplingParams as SamplingParams,
    StructuredOutputsParams as StructuredOutputsParams,
)
