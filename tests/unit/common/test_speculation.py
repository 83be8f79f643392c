"""The setting --speculative-config: what is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.common.config.engine import EngineConfig
from tandem.common.speculation import (
    Speculation,
    SpeculationStats,
    parse_speculation,
    with_draft_at,
)
from tandem.errors import ConfigError


def test_methods_and_their_keys() -> None:
    assert parse_speculation("off") is None
    auto = parse_speculation("auto")
    assert auto is not None
    assert auto.method == "suffix"
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    assert parse_speculation(json.dumps(ngram)) == Speculation("ngram", 5, 5, 5)
    ngram |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert parse_speculation(json.dumps(ngram)) == Speculation("ngram", 5, 2, 4)
    suffix = {"method": "suffix", "suffix_decoding_max_spec_factor": 2}
    expected = Speculation("suffix", 32, 3, 24, 2.0, 0.1, 10_000)
    assert parse_speculation(json.dumps(suffix)) == expected
    draft = {"method": "draft_model", "model": "x", "num_speculative_tokens": 5, "revision": "y"}
    text = json.dumps(draft)
    assert parse_speculation(text) == Speculation("draft_model", 5, model="x", revision="y")
    moved = parse_speculation(with_draft_at(text, "/there"))
    assert moved == Speculation("draft_model", 5, model="/there")
    suffix |= {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 0}
    expected = Speculation("suffix", 32, 3, 24, 0.0, 0.1, 0)
    assert parse_speculation(json.dumps(suffix)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("on", "it must be auto, off or a JSON object"),
        ("[1]", "it must be auto, off or a JSON object"),
        ({}, "it must be one of: ngram, suffix"),
        ({"method": "eagle"}, "it must be one of: ngram, suffix"),
        ({"method": "ngram"}, "lacks the key num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 64"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "lacks the key model"),
        ({"method": "draft_model", "model": "x"}, "lacks the key num_speculative_tokens"),
        ({"method": "draft_model", "model": 3, "num_speculative_tokens": 4}, "must be a text"),
        ({"method": "suffix", "model": "x"}, "the key 'model', which the method suffix does not"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "from 0 to 1"),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 10_001},
            "from 0 to 10000",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3}
            | {"prompt_lookup_max": 2},
            "prompt_lookup_min 3, which must not be more",
        ),
    ],
)
def test_other_values_are_refused_by_name(given: Any, message: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(ConfigError, match="speculative-config") as refused:
        EngineConfig(model="", speculative_config=text).check_together()
    assert message in str(refused.value)


def test_counts_by_position() -> None:
    stats = SpeculationStats()
    for num_proposed, num_accepted in ((3, 2), (1, 1), (4, 0)):
        stats.count(num_proposed, num_accepted)
    copied = stats.copy()
    stats.count(1, 1)
    assert copied == SpeculationStats(3, 8, 3, [2, 1, 0, 0])
