"""Each sampling option against transformers' logits processors or a closed form, all of them in one mixed batch."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve import SamplingParams
from nanoserve import sampler as sampler_module
from nanoserve.sampler import ROW, gather_logprobs, sample, sampling_row

CPU = torch.device("cpu")
DRAWS = 20_000
LOGITS = torch.tensor([1.5, -0.5, 2.25, 0.0, 1.0, -2.0, 2.0, 0.5, -1.0, 1.25])
CASES = [
    dict(),
    dict(temperature=0.25),
    dict(temperature=3.0),
    dict(top_k=1),
    dict(top_k=3),
    dict(top_k=9),
    dict(top_k=10),
    dict(top_k=1000),
    dict(top_k=-1),
    dict(top_p=1e-9),
    dict(top_p=0.3),
    dict(top_p=0.9),
    dict(top_p=0.999),
    dict(top_p=1 - 1e-9),
    dict(min_p=0.05),
    dict(min_p=0.5),
    dict(min_p=1.0),
    dict(top_k=4, top_p=0.6),
    dict(top_k=4, top_p=0.99),
    dict(top_k=1000, top_p=0.6),
    dict(min_p=0.2, top_k=7, top_p=0.8),
    dict(temperature=2.0, min_p=0.3, top_k=8, top_p=0.95),
    dict(temperature=0.4, top_p=0.7, seed=7),
    dict(temperature=0.0, top_k=5, top_p=0.5),
    dict(temperature=1e-6),
]


def draw(logits, params, positions=None, generator=None):
    """One token a row, of a single row of logits for all or of one for each."""
    logits = logits.expand(len(params), -1) if logits.dim() == 1 else logits
    asked = np.array([sampling_row(each) for each in params], ROW)
    generator = generator or torch.Generator(logits.device).manual_seed(0)
    return sample(logits, asked, np.array(positions or range(len(params))), generator)


def expected_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None):
    if temperature < 1e-5:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, logits[None].double())[0].softmax(-1)


def assert_distributed(tokens, probs):
    """No token of probability 0, and chi-square within 12 deviations; tokens expected under 5 times count as one."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probs)).double()
    assert (counts[probs == 0] == 0).all()
    expected = probs * len(tokens)
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    freedom = max(1, len(expected) - 2)
    assert ((observed - expected) ** 2 / expected.clamp(min=1)).sum() <= freedom + 12 * math.sqrt(freedom)


def draw_mixed(device):
    """[case, draw]: all cases side by side in one batch."""
    params = [SamplingParams(**case) for case in CASES] * DRAWS
    return draw(LOGITS.to(device), params).view(DRAWS, len(CASES)).T


@pytest.fixture(scope="module")
def mixed_draws():
    return draw_mixed("cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_of_a_mixed_batch_is_distributed_as_transformers_would(mixed_draws, case):
    assert_distributed(mixed_draws[CASES.index(case)], expected_probs(LOGITS, **case))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_draws_from_the_same_distributions():
    for case, tokens in zip(CASES, draw_mixed("cuda"), strict=True):
        assert_distributed(tokens, expected_probs(LOGITS, **case))


@pytest.mark.parametrize(
    "logits,params,kept",
    [
        ([1, 3, 2, 2, 0], dict(top_k=2), {1, 2, 3}),  # ties with the k-th stay, as in transformers
        ([2, 2, 2, 1], dict(top_k=1), {0, 1, 2}),
        (np.log([0.2, 0.2, 0.4, 0.2]), dict(top_k=2, top_p=0.5), {0, 2}),
        ([0, 1, 1, 1, 1], dict(top_k=2, top_p=0.6), {1, 2, 3}),  # top_p counts what top_k left: four of a quarter
        ([0, 0, 0, 0], dict(top_p=0.5), {0, 1}),  # the smallest set that reaches it, lower ids first
        ([0, 0, 0, 0], dict(top_p=0.51), {0, 1, 2}),
        ([0] * 10, dict(top_p=0.7), set(range(7))),
        (np.log([0.2, 0.2, 0.4, 0.2]), dict(top_p=0.7), {0, 1, 2}),
        ([0, 2, 2, 2], dict(top_p=1e-9), {1}),  # what argmax would take
        ([2, 2, 1, 2], dict(min_p=1.0), {0, 1, 3}),
        (np.log([0.5, 0.3, 0.2]), dict(top_p=0.5), {0}),  # reached exactly
        (np.log([0.5, 0.3, 0.2]), dict(top_p=0.501), {0, 1}),  # the token that crosses stays
        (np.log([0.4, 0.4, 0.2]), dict(min_p=0.5), {0, 1, 2}),  # at least min_p times as probable
        (np.log([0.6, 0.3, 0.1]), dict(min_p=0.2, top_p=0.65), {0}),  # min_p first: then 0.6 is two thirds
        (np.log([0.6, 0.3, 0.1]), dict(top_k=2, top_p=0.65), {0}),  # top_k first, likewise
    ],
)
def test_exactly_the_tokens_that_may_come_do(logits, params, kept):
    tokens = draw(torch.tensor(np.array(logits), dtype=torch.float32), [SamplingParams(**params)] * 500)
    assert set(tokens.tolist()) == kept


def keep(logits, **params):
    """Which tokens a row may draw, without drawing."""
    kept, real = [], sampler_module._keep_likeliest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_keep_likeliest", lambda *args: kept.append(real(*args)) or kept[0])
        draw(logits, [SamplingParams(**params)])
    return kept[0][0] > -torch.inf


@pytest.mark.parametrize("top_p", [1e-300, 1e-4, 0.5, 0.999, 0.999999, 1 - 1e-7, 1 - 1e-15])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 30.0])
def test_top_p_over_a_large_vocabulary_is_right_to_a_millionth(top_p, scale):
    logits = torch.randn(150_000, generator=torch.Generator().manual_seed(1)) * scale
    kept, probs = keep(logits, top_p=top_p), logits.double().softmax(-1)
    mass, smallest = probs[kept].sum(), probs[kept].min()
    assert mass >= top_p - 2e-6 and (kept.sum() == 1 or mass - smallest < top_p)
    assert not (kept | (probs <= smallest)).logical_not().any()  # nothing likelier was left out


def test_temperature_zero_is_argmax_beside_rows_that_draw():
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(2)).bfloat16()  # with ties
    params = [SamplingParams(temperature=row % 2 * 5.0, top_k=row % 3, top_p=0.9) for row in range(400)]
    before = logits.clone()
    tokens = draw(logits, params)
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    assert not torch.equal(tokens[1::2], logits.argmax(-1)[1::2])
    assert torch.equal(logits, before)  # the logprobs are still to be read from them


def test_a_batch_of_greedy_rows_draws_nothing():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    assert draw(LOGITS, [SamplingParams(temperature=0)] * 3, generator=generator).tolist() == [2, 2, 2]
    assert torch.equal(generator.get_state(), state)


def test_only_rows_with_a_top_p_and_no_top_k_sort_the_vocabulary(monkeypatch):
    sizes, sort = [], np.sort
    monkeypatch.setattr(np, "sort", lambda array: sizes.append(array.shape) or sort(array))
    cases = [dict(), dict(top_k=3), dict(temperature=0, top_p=0.5), dict(top_k=2, top_p=0.5), dict(min_p=0.1)]
    draw(LOGITS, [SamplingParams(**case) for case in cases])
    assert sizes == []
    draw(LOGITS, [SamplingParams(**case) for case in [*cases, dict(top_p=0.5), dict(top_p=0.9)]])
    assert sizes == [(2, 10)]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("options", [dict(), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)])
def test_tiny_temperatures_tend_to_argmax_without_overflow(temperature, scale, options):
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(4)) * 10 * scale
    logits[:, :3] = -torch.inf
    top = logits.topk(2).values
    clear = top[:, 0] - top[:, 1] > 50 * temperature
    tokens = draw(logits, [SamplingParams(temperature=temperature, **options)] * 200)
    assert clear.sum() > 150 and torch.equal(tokens[clear], logits.argmax(-1)[clear])


def test_huge_temperatures_leave_the_order_to_top_k_and_top_p():
    logits = torch.linspace(0, 1, 40)
    for options in (dict(top_k=1), dict(top_p=1e-6)):
        assert set(draw(logits, [SamplingParams(temperature=1e6, **options)] * 50).tolist()) == {39}
    tokens = draw(logits, [SamplingParams(temperature=1e6)] * DRAWS)
    assert_distributed(tokens, torch.full((40,), 1 / 40, dtype=torch.float64))


@pytest.mark.parametrize("noise", [0.0, 1.0, None])
@pytest.mark.parametrize("options", [dict(), dict(top_k=2), dict(top_p=0.9), dict(min_p=0.01)])
def test_a_token_of_probability_zero_never_comes_whatever_the_noise(noise, options, monkeypatch):
    """Uniform noise of 0 is exponential noise of infinity, and of 1 is 0; None: one of both for each token."""

    def extreme(self, generator=None):
        return self.copy_((torch.rand(self.shape) < 0.5).float()) if noise is None else self.fill_(noise)

    monkeypatch.setattr(torch.Tensor, "uniform_", extreme)
    logits = torch.tensor([-torch.inf, 0.0, -200.0, 0.1, -torch.inf, -40.0])
    tokens = draw(logits, [SamplingParams(**options)] * 300)
    assert set(tokens.tolist()) == ({1, 3} if noise is None else {3})


def test_seeded_rows_are_the_same_alone_and_anywhere_in_any_batch():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for options in (dict(), dict(temperature=2.0, top_k=20), dict(top_p=0.8), dict(min_p=0.1, top_k=50, top_p=0.9)):
        seeded = [SamplingParams(seed=seed, **options) for seed in (0, 1, -2, 2**64 - 1)]
        alone = [[draw(logits, [params], [position]).item() for position in range(5)] for params in seeded]
        others = [SamplingParams(**case) for case in CASES]
        for place in (0, 3, len(others)):
            for position in range(5):
                params = others[:place] + seeded + others[place:]
                tokens = draw(logits, params, [position] * len(params), torch.Generator().manual_seed(place + 9))
                assert tokens[place : place + 4].tolist() == [tokens_of[position] for tokens_of in alone]
        assert len(set(map(tuple, alone))) == 4 and len(set(alone[0])) > 1


@pytest.mark.parametrize("step", [1, 2**31, 2**32, 2**61 - 1, 2**63])
def test_seeds_and_positions_do_not_repeat_each_other(step):
    logits, size = torch.zeros(4), 4000
    params = [SamplingParams(seed=i, temperature=1.0) for i in range(size)]
    first = draw(logits, params, [50] * size)
    for other_params, positions in (
        ([SamplingParams(seed=i + step) for i in range(size)], [50] * size),
        ([SamplingParams(seed=i - min(step, 2**63 - 1)) for i in range(size)], [50] * size),
        (params, [51] * size),
        ([SamplingParams(seed=i + 1) for i in range(size)], [49] * size),
    ):
        pairs = first * 4 + draw(logits, other_params, positions)
        assert_distributed(pairs, torch.full((16,), 1 / 16, dtype=torch.float64))


def test_rows_without_a_seed_differ_and_follow_the_generator():
    params = [SamplingParams()] * 50
    first, again, other = (draw(torch.zeros(1000), params, None, torch.Generator().manual_seed(s)) for s in (6, 6, 7))
    assert torch.equal(first, again) and not torch.equal(first, other) and len(set(first.tolist())) > 40


def test_logprobs_are_the_models_own_with_the_sampled_token_first():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(8))
    params = [SamplingParams(temperature=0.3, top_k=2, logprobs=n) for n in (0, 1, 3, None, 2, 0)]
    assert [sampling_row(each)[-1] for each in params] == [0, 1, 3, -1, 2, 0]
    token_ids = torch.tensor([0, 5, 39, 7, 7, 1])
    ids, logprobs, rank = gather_logprobs(logits, token_ids, 3)
    reference = logits.double().log_softmax(-1)
    order = reference.argsort(dim=-1, descending=True)
    assert torch.equal(ids, torch.cat((token_ids[:, None], order[:, :3]), dim=1))
    torch.testing.assert_close(logprobs.double(), reference.gather(1, ids), rtol=0, atol=1e-5)
    assert [order[row, r - 1] for row, r in enumerate(rank.tolist())] == token_ids.tolist()


@pytest.mark.parametrize("num_logprobs,width", [(0, 1), (4, 5), (5, 5)])
def test_logprobs_of_none_and_of_more_than_there_are(num_logprobs, width):
    ids, logprobs, rank = gather_logprobs(torch.tensor([[1.0, 2.0, 2.0, -torch.inf]]), torch.tensor([2]), num_logprobs)
    assert ids.shape == logprobs.shape == (1, width) and ids[0, 0] == 2 and rank.tolist() == [2]  # of two that tie
