"""Settings for sampling defaults and for parsing a model's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cyclopts import Parameter

from tandem.common.config.groups import REQUESTS
from tandem.common.options import Options, Seconds

ToolParser = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3",
    "llama4",
    "lfm2",
    "olmo3",
    "gemma4",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "seed_oss",
    "minimax_m2",
    "minimax_m3",
    "glm45",
    "hunyuan",
    "kimi_k2",
    "phi4_mini",
    "granite",
    "nemotron",
    "cohere",
    "harmony",
    "json",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "think",
    "mistral",
    "gemma4",
    "minimax_m3",
    "seed_oss",
    "hunyuan",
    "hy3",
    "ernie45",
    "cohere",
    "granite",
]


@Parameter(name="*", group=REQUESTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig(Options):
    """Options for sampling defaults, for parsing the model's output, and for keeping the KV of
    conversations with tool calls."""

    generation_config: Literal["auto", "none"] = "auto"
    """Default sampling parameters. auto: from the model's generation_config.json. none: OpenAI's
    defaults."""

    tool_parser: ToolParser = "auto"
    """Format in which the model writes tool calls. auto: derived from the model's chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """Tags that mark the model's reasoning. auto: derived from the model's chat template."""
    tool_pin_s: Seconds = 60.0
    """Seconds for which the KV of a conversation is protected from eviction after a tool call of
    the model. 0: off."""
