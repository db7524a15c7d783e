"""What SamplingParams takes, refuses and defaults to."""

import dataclasses

import pytest

from nanoserve import SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == dict(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, max_tokens=16, stop=(), stop_token_ids=(),
        ignore_eos=False, logprobs=None, skip_special_tokens=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name,values",
    {
        "temperature": [-0.1, NAN, INF, "1", None, True],
        "top_p": [0, 0.0, -0.5, 1.01, NAN, None, "0.9"],
        "top_k": [-2, 1.5, "5", None, 2**40, True],
        "min_p": [-0.01, 1.01, NAN, None],
        "seed": [1.5, "7", -(2**63) - 1, 2**64, 10**400, False],
        "max_tokens": [0, -1, 1.0, INF, "16"],
        "stop": ["", [""], ["a", ""], ["a", 5], 5, 0, b"a", {"a"}],
        "stop_token_ids": [5, 0, [-1], [1.0], ["</s>"], [True], {5}],
        "ignore_eos": [1, None, "yes"],
        "logprobs": [-1, 1.5, True, "5"],
        "skip_special_tokens": [0, None],
    }.items(),
)
def test_an_impossible_value_is_refused_by_name_and_value(name, values):
    for value in values:
        with pytest.raises(ValueError) as error:
            SamplingParams(**{name: value})
        assert name in str(error.value) and repr(value)[:90] in str(error.value)


@pytest.mark.parametrize("name", ["n", "best_of", "presence_penalty", "use_beam_search", "guided_decoding", "top_kk"])
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 2})


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0),
        dict(temperature=2, top_p=1, min_p=1),
        dict(top_p=1e-9, min_p=0, top_k=-1),
        dict(top_k=10**6),
        dict(seed=-(2**63)),
        dict(seed=2**64 - 1),
        dict(max_tokens=None),
        dict(logprobs=0),
    ],
)
def test_the_limits_themselves_are_taken(options):
    params = SamplingParams(**options)
    assert all(getattr(params, name) == value for name, value in options.items())


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    assert SamplingParams(stop=("a", "b"), stop_token_ids=[3, 0]).stop == ("a", "b")
    assert SamplingParams(stop=[], stop_token_ids=None) == SamplingParams()


def test_params_do_not_change_under_a_request():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b"), ids.append(2)
    assert params.stop == ("a",) and params.stop_token_ids == (1,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None
