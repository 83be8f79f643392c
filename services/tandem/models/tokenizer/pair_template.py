"""The prompt with which a model judges how well a document answers a query."""

import re
from dataclasses import dataclass

from tandem.errors import ConfigError

_PLACE = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text of a prompt with the places {query}, {document} and, optionally, {instruction}. The
    tokenizer adds its special tokens, such as bos, only if the text has none."""

    text: str
    instruction: str = ""  # the instruction of requests that send none

    def __post_init__(self) -> None:
        """Raises ConfigError unless the text has the query, and the document once, last of the
        places. The prompts of one query then begin alike, and their KV is computed once."""
        places = _PLACE.findall(self.text)
        if "query" not in places or places.count("document") != 1 or places[-1] != "document":
            raise ConfigError(
                "the template of scores must have {query} and then, exactly once, {document}"
            )

    @property
    def takes_instruction(self) -> bool:
        return "{instruction}" in self.text

    def parts(self, instruction: str, query: str, document: str) -> tuple[str, str, str]:
        """Returns the text before the document, the document, and the text after it."""
        values = {"instruction": instruction or self.instruction, "query": query}
        before, after = self.text.split("{document}")
        filled = _PLACE.sub(lambda place: values[place[1]], before)
        return filled, document, after


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document. The prompt is that of `template`; None: the two texts as the
    tokenizer joins them."""

    query: str
    document: str
    template: PairTemplate | None = None
    instruction: str = ""  # "": that of the template

    @property
    def num_characters(self) -> int:
        return len(self.query) + len(self.document) + len(self.instruction)


# The prompt in Qwen3-Reranker's documentation: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
QWEN3_RERANKER = PairTemplate(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Given a web search query, retrieve relevant passages that answer the query",
)
