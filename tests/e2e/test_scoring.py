"""A model that scores texts: the scores of a cluster are those of transformers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from tandem.models.tokenizer.pair_template import Pair
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.e2e.conftest import StartCluster
from tests.harness.client import metric, wait_published
from tests.tiny_models import make_tiny_classifier

QUERY = "Which city is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Horses eat grass.", "Lyon is a city. " * 20]


def test_a_cluster_reranks_as_transformers_does(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "scoring"
    model, reference = make_tiny_classifier(
        "qwen3", folder, num_labels=1, max_position_embeddings=1024
    )
    tokenizer = Tokenizer.of(model)
    prompts = [tokenizer.encode_pair(Pair(QUERY, document)) for document in DOCUMENTS]
    with torch.inference_mode():
        logits = [reference(torch.tensor([prompt])).logits[0, 0] for prompt in prompts]
    expected = torch.stack(logits).sigmoid().tolist()
    assert max(expected) - min(expected) > 0.01
    with start_cluster("--dtype", "float32", model=str(folder)) as cluster:
        body = {"query": QUERY, "documents": DOCUMENTS}
        cached = []
        for _ in range(2):
            response = httpx.post(f"{cluster.url}/v1/rerank", json=body, timeout=60)
            assert response.status_code == 200, response.text
            answer = response.json()
            scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
            assert [scores[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
            assert list(scores) == sorted(scores, key=lambda index: -scores[index])
            usage = answer["usage"]
            assert usage["prompt_tokens"] == sum(map(len, prompts))
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            wait_published(cluster)
        # The prompts share the query, and each token is a letter.
        assert cached[0] <= 2 * len(QUERY)
        # A worker may compute a short prompt itself, rather than pull it from another worker.
        assert cached[1] >= max(map(len, prompts)) // 16 * 16
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total") > 0
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        refused = httpx.post(f"{cluster.url}/v1/chat/completions", json=chat, timeout=60)
        assert refused.status_code == 400
        assert "does not serve chats and completions" in refused.json()["error"]["message"]
        cluster.wait_idle()
