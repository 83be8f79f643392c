"""Request bodies and replies of reranking, scores and classes, in vLLM's formats.

A rerank and a score judge pairs of a query and a document, each with a prompt of its own
(`Scorer.template`). The prompts of one query begin alike, so the prefix cache computes the
beginning once.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tandem.api.openai.embeddings import INPUTS_MAX, InputField, prompts_of, to_requests
from tandem.api.openai.fields import FieldPolicy, each
from tandem.api.openai.replies import summed
from tandem.api.openai.requests import PriorityFields
from tandem.common.sampling_params import SamplingParams, refusal_of
from tandem.errors import BadRequest
from tandem.models.scoring import Scorer
from tandem.models.tokenizer.pair_template import Pair
from tandem.router.request.allowed import ALLOWED
from tandem.router.request.delta import Delta
from tandem.router.request.request import ClientRequest

# Largest sum of the characters of all prompts of a body. The query counts once for each document.
PROMPT_CHARACTERS_MAX = 16 << 20
_TEXTS = f"a non-empty string, or a list of 1 to {INPUTS_MAX} of them"
_ALLOWED = {
    "query": "a non-empty string",
    "documents": f'a list of 1 to {INPUTS_MAX} strings or objects such as {{"text": "..."}}',
    "text_1": _TEXTS,
    "text_2": f"{_TEXTS}. A single text of one field is paired with each of the other",
    "queries": f"{_TEXTS}; another name of text_1",
    "input": f"a non-empty string, a list of token ids, or a list of at most {INPUTS_MAX} such "
    "inputs",
    "top_n": "an integer of at least 0; 0 returns all documents",
    "return_documents": "true or false",
    "use_activation": "true or false; with false, scores are logits",
    "activation": "true or false; another name of use_activation",
    "softmax": "true or false; another name of use_activation",
    "instruction": "a string, and only if the model's template of scores has an instruction",
    "truncate_prompt_tokens": f"{ALLOWED['truncate_prompt_tokens']}. A document loses its end",
}
_POLICY = FieldPolicy(
    records=frozenset(("user",)),
    refused=each("mm_processor_kwargs", "rank_fields", "max_tokens_per_doc", "max_chunks_per_doc"),
)
_Texts = str | Annotated[list[str], Field(min_length=1, max_length=INPUTS_MAX)]


class Document(BaseModel):
    """A document as an object. Further keys, such as titles, are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


class _ScoringBody(PriorityFields):
    field_policy = _POLICY
    allowed = _ALLOWED

    model: str = Field("", description=ALLOWED["model"])
    truncate_prompt_tokens: int | None = Field(None, description=_ALLOWED["truncate_prompt_tokens"])
    use_activation: bool | None = Field(None, description=_ALLOWED["use_activation"])
    activation: bool | None = Field(None, description=_ALLOWED["activation"])
    softmax: bool | None = Field(None, description=_ALLOWED["softmax"])

    @property
    def are_activated(self) -> bool:
        return False not in (self.use_activation, self.activation, self.softmax)


class _PairsBody(_ScoringBody):
    instruction: str = Field("", description=_ALLOWED["instruction"])

    def pairs_to_requests(
        self, pairs: Sequence[tuple[str, str]], scorer: Scorer, request_id: str
    ) -> list[ClientRequest]:
        """Builds one request for each query and document. Raises BadRequest."""
        template = scorer.template
        if self.instruction and not (template is not None and template.takes_instruction):
            raise refusal_of("instruction", _ALLOWED["instruction"])
        num_characters = sum(
            len(query) + len(document) + len(self.instruction) for query, document in pairs
        )
        if num_characters > PROMPT_CHARACTERS_MAX:
            raise BadRequest(
                f"the prompts have {num_characters} characters in all, where the query counts once "
                f"for each document; they may have at most {PROMPT_CHARACTERS_MAX}"
            )
        sampling = SamplingParams(max_tokens=0, truncate_prompt_tokens=self.truncate_prompt_tokens)
        priority = self.resolved_priority()
        return [
            ClientRequest(
                Pair(query, document, template, self.instruction),
                self.model,
                sampling,
                embed=True,
                priority=priority,
                request_id=f"{request_id}-{index}",
            )
            for index, (query, document) in enumerate(pairs)
        ]


class RerankBody(_PairsBody):
    query: Annotated[str, Field(min_length=1)] = Field(description=_ALLOWED["query"])
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=INPUTS_MAX)] = Field(
        description=_ALLOWED["documents"]
    )
    top_n: Annotated[int, Field(ge=0)] = Field(0, description=_ALLOWED["top_n"])
    return_documents: bool = Field(True, description=_ALLOWED["return_documents"])

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def to_requests(self, scorer: Scorer, request_id: str) -> list[ClientRequest]:
        """Builds one request for each document. Raises BadRequest."""
        pairs = [(self.query, document) for document in self.texts]
        return self.pairs_to_requests(pairs, scorer, request_id)


class ScoreBody(_PairsBody):
    """vLLM has two names for each of the two texts."""

    text_1: _Texts | None = Field(None, description=_ALLOWED["text_1"])
    text_2: _Texts | None = Field(None, description=_ALLOWED["text_2"])
    queries: _Texts | None = Field(None, description=_ALLOWED["queries"])
    documents: _Texts | None = Field(None, description="another name of text_2")

    def to_requests(self, scorer: Scorer, request_id: str) -> list[ClientRequest]:
        """Builds one request for each pair. Raises BadRequest if the two fields have different
        numbers of texts and neither has one."""
        first = _texts("text_1", self.text_1, self.queries)
        second = _texts("text_2", self.text_2, self.documents)
        num = max(len(first), len(second))
        if not {len(first), len(second)} <= {1, num}:
            raise BadRequest(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}; both must have the "
                "same number, or one of them a single text",
                param="text_2",
            )
        if len(first) == 1:
            first *= num
        if len(second) == 1:
            second *= num
        return self.pairs_to_requests(list(zip(first, second, strict=True)), scorer, request_id)


class ClassifyBody(_ScoringBody):
    input: InputField = Field(description=_ALLOWED["input"])
    add_special_tokens: bool = Field(True, description=ALLOWED["add_special_tokens"])

    def to_requests(self, request_id: str) -> list[ClientRequest]:
        """Builds one request for each input. Raises the errors of `embeddings.to_requests`."""
        return to_requests(
            prompts_of(self.input),
            self.model,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.resolved_priority(),
            request_id=request_id,
        )


def _texts(name: str, *values: str | list[str] | None) -> list[str]:
    given = [value for value in values if value is not None]
    if len(given) != 1 or "" in (texts := [given[0]] if isinstance(given[0], str) else given[0]):
        raise refusal_of(name, _ALLOWED[name], why="" if given else "missing")
    return list(texts)


@contextmanager
def naming_prompts(field: str) -> Iterator[None]:
    """Names `field` as the invalid one in a BadRequest about a prompt. The message of such an error
    says which of the prompts it is."""
    try:
        yield
    except BadRequest as error:
        if error.param != "prompt":
            raise
        raise type(error)(error.message, param=field) from None


def rerank_reply(
    body: RerankBody, scorer: Scorer, model: str, reply_id: str, deltas: Sequence[Delta]
) -> dict[str, Any]:
    """Builds the reply: the documents in the order of their scores, the best first. `deltas` has
    one delta for each document."""
    scores = _scores(body, scorer, deltas)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in best[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": body.texts[index]}
        results.append(result)
    return {
        "id": f"rerank-{reply_id}",
        "model": model,
        "usage": _usage(deltas),
        "results": results,
    }


def score_reply(
    body: ScoreBody, scorer: Scorer, model: str, reply_id: str, deltas: Sequence[Delta]
) -> dict[str, Any]:
    """Builds the reply: one score for each pair, in their order."""
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(_scores(body, scorer, deltas))
    ]
    return _listed(f"score-{reply_id}", model, data, deltas)


def classify_reply(
    body: ClassifyBody, scorer: Scorer, model: str, reply_id: str, deltas: Sequence[Delta]
) -> dict[str, Any]:
    """Builds the reply: for each input the scores of all labels, and the label with the largest."""
    labels = scorer.head.labels
    data = []
    for index, delta in enumerate(deltas):
        scores = scorer.scores(delta.embedding, are_activated=body.are_activated)
        best = max(range(len(labels)), key=lambda label: scores[label])
        data.append(
            {
                "index": index,
                "label": labels[best],
                "probs": scores,
                "num_classes": len(labels),
            }
        )
    return _listed(f"classify-{reply_id}", model, data, deltas)


def _scores(body: _ScoringBody, scorer: Scorer, deltas: Iterable[Delta]) -> list[float]:
    return [scorer.scores(delta.embedding, are_activated=body.are_activated)[0] for delta in deltas]


def _listed(
    reply_id: str, model: str, data: list[dict[str, Any]], deltas: Sequence[Delta]
) -> dict[str, Any]:
    return {
        "id": reply_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {**_usage(deltas), "completion_tokens": 0},
    }


def _usage(deltas: Iterable[Delta]) -> dict[str, Any]:
    total = summed(delta.usage for delta in deltas)
    return {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens,
        "prompt_tokens_details": total.cached_details,
    }
