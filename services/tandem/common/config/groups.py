"""Groups of options, and annotations shared by several programs."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from tandem.common.options import Text

# Groups of options, in the order in which help texts show them. PROCESS has the options that depend
# on where a process runs. MEASUREMENT has options that only tests and measurements need.
# Help texts show MEASUREMENT only if the variable TANDEM_DEV is set.
PROCESS = Group("Process", sort_key=1)
REQUESTS = Group("Requests", sort_key=2)
HTTP = Group("HTTP", sort_key=3)
FILES = Group("Files and batches", sort_key=3.5)
AUTOSCALER = Group("Autoscaler", sort_key=4)
ENGINE = Group("Engine", sort_key=5)
TRANSFER = Group("KV transfer", sort_key=6)
KV_EVENTS = Group("KV events", sort_key=7)
LIFECYCLE = Group("Lifecycle", sort_key=8)
MEASUREMENT = Group("Tests and measurements", sort_key=9, show=bool(os.environ.get("TANDEM_DEV")))
Own = Parameter(group=PROCESS)
ModelName = Annotated[
    str,
    Parameter(
        help="Model: a Hugging Face folder, a GGUF file or a name on the Hugging Face hub.",
        group=PROCESS,
    ),
]
ModelRevision = Annotated[
    Text,
    Parameter(
        help="Commit, tag or branch of a model on the hub. Only a commit never changes.",
        group=PROCESS,
    ),
]
ModelImpl = Annotated[
    Literal["auto", "tandem", "transformers"],
    Parameter(
        help="Code that computes the model. tandem: Tandem's own decoders. transformers: the model "
        "class of the transformers library, with Tandem's KV cache; slower. auto: transformers for "
        "architectures that Tandem's decoders lack, if tandem-llm[transformers] is installed.",
        group=PROCESS,
    ),
]
ServedModelName = Annotated[
    Text,
    Parameter(help="Name of the model in the API. Default: the model's own name.", group=PROCESS),
]
