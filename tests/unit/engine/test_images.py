"""Prompts with images give the tokens of transformers however their sequence runs: in chunks of any
size, prefilled by another engine, moved to another engine, or computed after a peer has failed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from PIL import Image
from transformers import PreTrainedModel

from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import BadRequest
from tandem.models.folder import ModelFolder
from tests.engine_driver import drive, make_spec
from tests.model_engines import make_model_engine
from tests.unit.engine.tiny_runs import load, prefill_elsewhere
from tests.vision_models import (
    chat_part,
    make_image,
    make_vision_model,
    own_prompt,
    reference_prompt,
    reference_tokens,
)

NUM_TOKENS = 12
Made = tuple[ModelFolder, PreTrainedModel]
WIDE, LIKE_WIDE = make_image(1, 90, 60), make_image(2, 90, 60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_vision_model(tmp_path_factory.mktemp("smolvlm"))


def chat(*images: Image.Image) -> list[dict[str, Any]]:
    parts = [part for image in images for part in (chat_part(image), {"type": "text", "text": "a"})]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def expected(made: Made) -> dict[str, list[int]]:
    """The tokens of transformers after each of `specs`."""
    return {
        str(number): reference_tokens(
            made[1], *reference_prompt(made[0], chat(*images), images), NUM_TOKENS
        )
        for number, images in enumerate(([WIDE], [LIKE_WIDE, WIDE]))
    }


def specs(made: Made, mode: Mode = Mode.LOCAL, **more: Any) -> list[SequenceSpec]:
    found = []
    for number, images in enumerate(([WIDE], [LIKE_WIDE, WIDE])):
        token_ids, placed = own_prompt(made[0], chat(*images))
        found.append(
            make_spec(
                str(number), token_ids, mode=mode, max_tokens=NUM_TOKENS, images=placed, **more
            )
        )
    return found


@pytest.mark.parametrize("step_tokens", [7, 64])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_in_chunks(
    made: Made, expected: dict[str, list[int]], step_tokens: int, kernels: str
) -> None:
    engine, _ = load(made, kernels=kernels, step_tokens=step_tokens)
    for spec in specs(made):
        engine.add(spec)
    assert drive(engine).token_ids == expected
    engine.close()


def test_prefilled_by_another_engine(made: Made, expected: dict[str, list[int]]) -> None:
    def asked(mode: Mode) -> list[SequenceSpec]:
        return specs(made, mode)

    source, here = load(made, step_tokens=37), load(made)
    outcome, _ = prefill_elsewhere(source, here, asked)
    assert outcome.token_ids == expected
    for engine, _ in (source, here):
        engine.close()


def test_computed_here_after_a_peer_has_failed_and_moved(
    made: Made, expected: dict[str, list[int]]
) -> None:
    engine, _ = load(made)
    for spec in specs(made, Mode.WAITING_FOR_REMOTE_KV):
        engine.add(spec)
    engine.step()
    for name in expected:
        engine.start_local_prefill(name)
    assert drive(engine).token_ids == expected
    engine.close()
    # another engine gets the requests after their first tokens
    other, _ = load(made)
    for spec in specs(made):
        token_ids = [*spec.token_ids, *expected[spec.sequence_id][:5]]
        other.add(msgspec.structs.replace(spec, token_ids=token_ids))
    rest = {name: tokens[5:] for name, tokens in expected.items()}
    assert drive(other).token_ids == rest
    other.close()


def test_an_image_that_cannot_be_computed_fails_its_sequence_alone(made: Made) -> None:
    engine, _ = load(made)
    first, second = specs(made)
    broken = [msgspec.structs.replace(image, data=b"x") for image in first.images]
    engine.add(msgspec.structs.replace(first, images=tuple(broken)))
    text = make_spec("text", [5, 6, 7], max_tokens=3)
    engine.add(text)
    outcome = drive(engine)
    assert [failed.sequence_id for report in outcome.reports for failed in report.failed] == ["0"]
    assert len(outcome.token_ids["text"]) == 3
    # the broken one has left nothing that the same image gets
    engine.add(second)
    assert len(drive(engine).token_ids["1"]) == NUM_TOKENS
    assert engine.load().blocks_used == 0
    engine.close()


def test_tokens_of_images_outside_the_prompt_are_refused(made: Made) -> None:
    engine, _ = make_model_engine(made[0], num_blocks=64)
    spec = specs(made)[1]
    for images in (
        spec.images[::-1],
        (msgspec.structs.replace(spec.images[0], starts=[]),),
        (msgspec.structs.replace(spec.images[0], starts=[len(spec.token_ids)]),),
        (msgspec.structs.replace(spec.images[0], digest=b"short"),),
    ):
        with pytest.raises(BadRequest, match="an image has"):
            engine.add(msgspec.structs.replace(spec, images=images))
    engine.close()
