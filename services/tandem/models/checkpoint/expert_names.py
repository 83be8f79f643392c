"""Names and shapes of the experts' tensors in checkpoints, by naming scheme.

Schemes:
- apart: each expert has its own tensors.
- stacked: one tensor has the matrices of all experts; gate and up are joined.
- GGUF: one tensor has the matrices of all experts; gate and up are separate.
- gpt-oss: as stacked, but with biases, interleaved gate and up, and transposed matrices.
- Llama 4: as stacked, but with transposed matrices.

In the table, names are relative to the layer, E is the number of an expert, and "inner" is an
expert's intermediate size.

scheme    name                                          shape                   models, or matrix
apart     block_sparse_moe.gate.weight                  [experts, hidden]       Mixtral
          block_sparse_moe.experts.E.{w1,w3}.weight     [inner, hidden]         gate and up
          block_sparse_moe.experts.E.w2.weight          [hidden, inner]         down
          mlp.experts.E.{w1,w3,w2}.weight                                       Kimi Linear
          mlp.gate.weight, mlp.experts.E.{gate,up,down}_proj.weight             Qwen 3, DeepSeek
          mlp.gate.e_score_correction_bias              [experts]               DeepSeek V3
          mlp.gate.tid2eid, integers                    [vocab, top k]          DeepSeek V4
          mlp.shared_experts.{gate,up,down}_proj.weight                         DeepSeek
          mlp.shared_expert.{gate,up,down}_proj.weight                          Qwen 3 Next
          mlp.shared_expert_gate.weight                 [1, hidden]             Qwen 3 Next
stacked   mlp.gate.weight                               [experts, hidden]       all of the above
          mlp.experts.gate_up_proj                      [experts, 2 inner, hidden]
          mlp.experts.down_proj                         [experts, hidden, inner]
GGUF      mlp.gate.weight                               [experts, hidden]
          mlp.experts.{gate,up}_proj.weight             [experts, inner, hidden]
          mlp.experts.down_proj.weight                  [experts, hidden, inner]
Llama 4   mlp.gate.weight                               [experts, hidden]
          mlp.experts.gate_up_proj                      [experts, hidden, 2 inner]
          mlp.experts.down_proj                         [experts, inner, hidden]
gpt-oss   mlp.router.{weight,bias}                      [experts, hidden], [experts]
          mlp.experts.gate_up_proj, gate and up interleaved     [experts, hidden, 2 inner]
          mlp.experts.gate_up_proj_bias                 [experts, 2 inner]
          mlp.experts.down_proj                         [experts, inner, hidden]
          mlp.experts.down_proj_bias                    [experts, hidden]

GGUF files of gpt-oss use the names of the GGUF scheme, and also have biases, such as
`mlp.experts.gate_proj.bias`. In MXFP4 checkpoints of gpt-oss, each matrix has the shape
[experts, out, in]. It is stored as two tensors with the suffixes `_blocks` and `_scales`
(check.py).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from tandem.errors import UnsupportedModel
from tandem.models.config.experts import Experts
from tandem.models.config.families import ExpertForm
from tandem.models.config.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]

MXFP4_BLOCK = 32  # number of consecutive weights of a row that share a scale
CORRECTION = "e_score_correction_bias"
TABLE = "tid2eid"
STACKED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_OF_GGUF = tuple(f"mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down"))
_PLACES: dict[ExpertForm, str] = {
    "mixtral": "block_sparse_moe",
    "qwen": "mlp",
    "deepseek": "mlp",
    "kimi": "mlp",
    "llama4": "mlp",
    "granite": "mlp",
    "nemotron": "mlp",
}
_PARTS: dict[ExpertForm, tuple[str, ...]] = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen": ("gate_proj", "up_proj", "down_proj"),
    "deepseek": ("gate_proj", "up_proj", "down_proj"),
    "kimi": ("w1", "w3", "w2"),
    "llama4": ("gate_proj", "up_proj", "down_proj"),
    "granite": ("gate_proj", "up_proj", "down_proj"),
    "nemotron": ("up_proj", "down_proj"),
}


def shared_mlp(experts: Experts) -> str:
    """Returns the name of the MLP that all tokens use."""
    if experts.has_own_norms:
        return "mlp"
    return "mlp.shared_expert" if experts.has_shared_gate else "mlp.shared_experts"


def bias_of(weight: str) -> str:
    """Returns the name of the bias that belongs to a weight in a GGUF file."""
    return f"{weight.removesuffix('weight')}bias"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The naming scheme of one layer's expert tensors. Names are relative to the layer."""

    form: ExpertForm
    is_stacked: bool
    is_mxfp4: bool = False
    is_gguf: bool = False  # True: the tensors have the names of the GGUF scheme.

    @classmethod
    def of(cls, config: ModelConfig, stored: Collection[str]) -> Self:
        """Detects the naming scheme from the names of the stored tensors."""
        is_stacked = config.expert_form in ("gpt_oss", "llama4") or any(
            name.endswith(STACKED_EXPERTS) for name in stored
        )
        is_gguf = any(name.endswith(_OF_GGUF) for name in stored)
        return cls(config.expert_form, is_stacked or is_gguf, config.is_mxfp4, is_gguf)

    @property
    def router(self) -> str:
        if self.form == "gpt_oss":
            return "mlp.router"
        return f"{'mlp' if self.is_stacked else _PLACES[self.form]}.gate"

    @property
    def correction(self) -> str:
        """Name of the learned bias that is added to the experts' scores when the router chooses
        experts."""
        return f"{self.router}.{CORRECTION}"

    @property
    def table(self) -> str:
        """Name of the table of the experts that are chosen for each token id."""
        return f"{self.router}.{TABLE}"

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the stacked tensors: (gate_up, down), or (gate, up, down) in GGUF files."""
        return _OF_GGUF if self.is_gguf else STACKED_EXPERTS

    def parts(self, expert: int) -> tuple[str, ...]:
        """Returns the names of an expert's gate, up and down matrices. Experts of Nemotron-H have
        no gate."""
        place = f"{_PLACES[self.form]}.experts.{expert}"
        return tuple(f"{place}.{part}.weight" for part in _PARTS[self.form])

    def shapes(self, experts: Experts, hidden: int) -> Shapes:
        shapes: Shapes = {f"{self.router}.weight": (experts.num, hidden)}
        if experts.is_corrected:
            shapes[self.correction] = (experts.num,)
        if self.form == "gpt_oss":
            shapes[f"{self.router}.bias"] = (experts.num,)
        if self.form == "gpt_oss" and not self.is_gguf:
            gate_up, down = self.stacked
            shapes |= self._shapes_of_gpt_oss(gate_up, experts.num, 2 * experts.inner, hidden)
            return shapes | self._shapes_of_gpt_oss(down, experts.num, hidden, experts.inner)
        if self.is_gguf:
            gate, up, down = self.stacked
            shapes[gate] = shapes[up] = (experts.num, experts.inner, hidden)
            shapes[down] = (experts.num, hidden, experts.inner)
            if experts.has_biases:
                shapes |= {bias_of(name): shapes[name][:2] for name in self.stacked}
            return shapes
        if self.is_stacked:
            gate_up, down = self.stacked
            num_first = len(_PARTS[self.form]) - 1
            shapes[gate_up] = (experts.num, num_first * experts.inner, hidden)
            shapes[down] = (experts.num, hidden, experts.inner)
            if self.form == "llama4":
                shapes |= {name: (experts.num, *shapes[name][:0:-1]) for name in self.stacked}
            return shapes
        for expert in range(experts.num):
            *first, down = self.parts(expert)
            shapes |= dict.fromkeys(first, (experts.inner, hidden))
            shapes[down] = (hidden, experts.inner)
        return shapes

    def _shapes_of_gpt_oss(self, name: str, num: int, num_out: int, num_in: int) -> Shapes:
        shapes: Shapes = {f"{name}_bias": (num, num_out)}
        if not self.is_mxfp4:
            return shapes | {name: (num, num_in, num_out)}
        if num_in % MXFP4_BLOCK:
            raise UnsupportedModel(
                f"the experts have {num_in} inputs; in MXFP4 the number of inputs must be a "
                f"multiple of {MXFP4_BLOCK}"
            )
        return shapes | {name: (num, num_out, num_in)}
