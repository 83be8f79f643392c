import math

import pytest

from tandem.errors import UnsupportedModel
from tandem.models.config.rope import Rope, RopeScaling, read_rope, read_ropes

OLD = {"rope_theta": 500000.0, "max_position_embeddings": 512}


def test_both_spellings_read_the_same():
    linear = RopeScaling(kind="linear", factor=4.0)
    old = OLD | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    new = {"max_position_embeddings": 512, "rope_parameters": parameters}
    assert read_rope(old) == read_rope(new) == Rope(500000.0, linear)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling(scaling):
    assert read_rope(OLD | {"rope_scaling": scaling}) == Rope(500000.0)


def test_a_theta_that_is_not_given():
    assert read_rope({"max_position_embeddings": 512}) == Rope(10000.0)
    assert read_rope({"max_position_embeddings": 512}, default_theta=2.0) == Rope(2.0)


def test_layers_with_a_window_may_have_a_rope_of_their_own():
    """Both spellings of Gemma 3, and what transformers assumes of absent keys."""
    linear = {"rope_type": "linear", "factor": 8.0}
    sizes = {"max_position_embeddings": 512}
    nested = {
        "full_attention": linear | {"rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    expected = {
        "full_attention": Rope(500000.0, RopeScaling(kind="linear", factor=8.0)),
        "sliding_attention": Rope(300.0),
    }
    old = OLD | {"rope_scaling": linear, "rope_local_base_freq": 300.0}
    for config in (sizes | {"rope_parameters": nested}, old):
        assert read_ropes(config, default_theta=1.0, by_kind=True) == expected
    assert read_ropes(sizes, default_theta=7.0, by_kind=True) == {
        "full_attention": Rope(7.0),
        "sliding_attention": Rope(10000.0),
    }
    assert read_ropes(sizes, default_theta=7.0) == dict.fromkeys(expected, Rope(7.0))


def test_ropes_by_kind_ignore_the_length_outside_of_them():
    """The key is for parameters that all layers have in common (Phi-3)."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    given = OLD | {"rope_parameters": {"full_attention": yarn}}
    ropes = [
        read_ropes(given | outside, default_theta=7.0, by_kind=True)["full_attention"]
        for outside in ({}, {"original_max_position_embeddings": 32})
    ]
    assert ropes[0] == ropes[1]
    assert ropes[0].scaling is not None
    assert ropes[0].scaling.original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_scaling_says_how_long_the_context_is(scaling, max_model_len):
    read = read_rope(OLD | {"rope_scaling": scaling}).scaling
    assert read is not None
    assert read.kind == scaling["rope_type"]
    assert read.max_model_len(512) == max_model_len


@pytest.mark.parametrize(
    ("extra", "attention_factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_yarn_scales_attention_as_transformers_does(extra, attention_factor):
    yarn = {"rope_type": "yarn", "factor": 4.0, **extra}
    scaling = read_rope(OLD | {"rope_scaling": yarn}).scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(attention_factor)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32, 1, True)


def test_longrope_chooses_by_the_longest_context():
    longrope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope = read_rope(OLD | {"rope_scaling": longrope, "original_max_position_embeddings": 128})
    assert rope.scaling is not None
    assert (rope.scaling.factor, rope.scaling.max_model_len(512)) == (4.0, 512)
    assert rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)
    assert rope.for_contexts(128) == rope
    assert rope.for_contexts(129).is_long
    yarn = read_rope(OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert yarn.for_contexts(4096) == yarn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic'.*llama3, yarn and longrope",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' needs short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0]}},
            "'longrope' needs long_factor, a list of numbers > 0",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor, a number > 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for each layer type"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be at most 1"),
    ],
)
def test_what_cannot_be_run_is_named(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read_rope(OLD | changes)
