"""Drafts by prompt lookup: which tokens are proposed, and that nothing but the number of steps depends on them."""

import ast
import inspect
import random
from collections import Counter
from itertools import product
from math import sqrt

import numpy as np
import pytest
import torch
from helpers_scheduler import check_scheduler, make_request, make_scheduler, step
from lockstep import vllm_scheduler
from tiny_models import CONFIGS, save_model

from bench import use_scheduler
from nanoserve import LLM, SamplingParams, model_runner
from nanoserve.async_scheduler import AsyncScheduler
from nanoserve.block_manager import cdiv
from nanoserve.ngram import NgramProposer
from nanoserve.scheduler import StaticBatchScheduler

NUM_LISTS = 5000
NUM_CHUNKS = 5
DRAWS = 20_000
PROMPT = [5, 2, 6]
FEW_WORDS = 8  # the vocabulary of a model that repeats itself, and whose draws can be counted
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
EAGER = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ON_OFF = (False, True)
# A small token budget, few blocks, the prefix cache, the policy, a stream.
COMBINATIONS = list(product(ON_OFF, ON_OFF, ON_OFF, ("fcfs", "priority"), ON_OFF))


def greedy(n=12, **more):
    return SamplingParams(**{"temperature": 0, "max_tokens": n, "ignore_eos": True, **more})


def seeded(seed, n=12, **more):
    return SamplingParams(seed=seed, max_tokens=n, ignore_eos=True, **more)


# What is proposed


def lookup(token_ids, num_drafts, shortest, longest):
    """The definition, from the start of the list for every length: the answers to compare with."""
    for n in range(min(longest, len(token_ids)), shortest - 1, -1):
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == token_ids[-n:]:
                return token_ids[start + n : start + n + num_drafts]
    return []


def random_lists(chunk, of=NUM_CHUNKS):
    """(tokens, ends where drafts are asked for, num_drafts, shortest, longest); half of them grow token by token."""
    for seed in range(chunk, NUM_LISTS, of):
        rng = random.Random(seed)
        length, alphabet = rng.randint(1, rng.choice([6, 20, 60])), rng.choice([1, 2, 2, 3, 4, 9])
        token_ids = [rng.randrange(alphabet) for _ in range(length)]
        begin, ends = rng.randint(1, length), range(1, length + 1)
        ends = ends[begin - 1 :] if seed % 2 else sorted(rng.choices(ends, k=4))  # drafts may be asked for twice
        shortest = rng.randint(1, 4)
        yield token_ids, ends, rng.randint(1, 5), shortest, shortest + rng.choice([0, 1, 1, 2, 3])


@pytest.mark.parametrize(
    "token_ids,drafts",
    [
        ([], []),
        ([5], []),
        ([5, 5], []),  # one token repeats, and two are asked for
        ([5, 6, 5, 6], [5, 6]),  # no more than there is
        ([5, 5, 5], [5]),  # an occurrence may overlap the suffix
        ([5, 5, 5, 5, 5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2]),  # the first of two
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),  # a longer suffix, although later
        ([1, 2, 3, 4, 5, 8, 9, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], [8, 9, 2]),  # five in common count as four
        ([1, 2, 3, 4, 5, 6, 7], []),
    ],
)
def test_drafts_are_what_followed_the_first_occurrence_of_the_longest_suffix(token_ids, drafts):
    assert NgramProposer(**DRAFTS).propose("r", token_ids) == lookup(token_ids, 3, 2, 4) == drafts


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_drafts_equal_a_search_from_the_start_however_the_tokens_come(chunk):
    found = Counter()
    for token_ids, ends, *options in random_lists(chunk):
        proposer = NgramProposer("ngram", options[0], prompt_lookup_min=options[1], prompt_lookup_max=options[2])
        for end in ends:
            drafts = proposer.propose("r", token_ids[:end])
            assert drafts == lookup(token_ids[:end], *options), (token_ids[:end], options)
            found[len(drafts)] += 1
    assert found.keys() >= {0, 1, 2, 3, 4, 5}


@pytest.fixture
def vllm_lookup(request, monkeypatch, tmp_path_factory):
    """vLLM's own function, from its wheel's source: without numba and without importing vllm."""
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("downloads vLLM's wheel: run with -m vllm")
    module, name = "vllm.v1.spec_decode.ngram_proposer", "_find_longest_matched_ngram_and_propose_tokens"
    source = vllm_scheduler.fetch() / vllm_scheduler._path(module)
    if not source.exists():  # the cache has only the modules that lockstep runs
        monkeypatch.setattr(vllm_scheduler, "EXECUTED", [module])
        monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path_factory.mktemp("wheel")))
        source = vllm_scheduler.fetch() / vllm_scheduler._path(module)
    (function,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) == name]
    function.decorator_list.clear()
    names = {"np": np}
    exec(compile(ast.Module([function], []), str(source), "exec"), names)
    return lambda token_ids, *args: names[name](np.array(token_ids, np.int32), *args).tolist()


@pytest.mark.vllm
def test_drafts_equal_vllms(vllm_lookup):
    num_found = 0
    for token_ids, ends, num_drafts, *bounds in random_lists(0, of=1):
        proposer = NgramProposer("ngram", num_drafts, prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1])
        for end in ends:
            drafts = proposer.propose("r", token_ids[:end])
            assert drafts == vllm_lookup(token_ids[:end], *bounds, 10**6, num_drafts), (token_ids[:end], bounds)
            num_found += bool(drafts)
    assert num_found > NUM_LISTS


def test_requests_do_not_find_each_others_tokens():
    rng, proposer, tokens = random.Random(0), NgramProposer(**DRAFTS), {name: [] for name in "abcdef"}
    num_reused = 0
    for _ in range(3000):
        name = rng.choice("abcdef")
        tokens[name] += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        assert proposer.propose(name, tokens[name]) == lookup(tokens[name], 3, 2, 4)
        if rng.random() < 0.05:
            gone = rng.sample("abcdefgh", k=3)  # two of them were never there
            proposer.forget(gone)
            tokens |= {name: [] for name in gone if name in tokens}  # their ids will be used again
            num_reused += 1
    assert num_reused > 100 and holds(proposer) == {name for name in tokens if tokens[name]}
    proposer.forget("abcdef")
    assert not holds(proposer)


def holds(proposer):
    """The requests that the proposer knows anything about."""
    return {key for each in vars(proposer).values() if isinstance(each, dict) for key in each}


class CountingList(list):
    """Counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        CountingList.num_read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        for i in range(len(self)):
            yield self[i]

    def index(self, *args):
        raise AssertionError("a search of the whole list")

    __contains__ = __reversed__ = count = copy = index


@pytest.mark.parametrize("alphabet", [1, 3, 10**6])
def test_a_new_token_costs_the_same_at_any_length(alphabet):
    """Tokens read: each n-gram that the new token ends, once to look for it and once to add it, and the drafts."""
    rng, proposer, costs = random.Random(1), NgramProposer(**DRAFTS), {}
    for length in (100, 10_000):
        token_ids = CountingList(rng.randrange(alphabet) for _ in range(length))
        proposer.propose(f"{length}", token_ids)
        CountingList.num_read = 0
        for _ in range(200):
            token_ids.append(rng.randrange(alphabet))
            proposer.propose(f"{length}", token_ids)
        costs[length] = CountingList.num_read / 200
    assert 0 < costs[10_000] <= 2 * (2 + 3 + 4) + 3 and costs[10_000] <= costs[100] * 1.5


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"method": "eagle"},
        {"method": "Ngram"},
        {"method": None},
        {"method": 7},
        *({name: value} for name in list(DRAFTS)[1:] for value in (0, -1, True, False, 2.0, 0.0, "3", "", [3])),
        {"num_speculative_tokens": None},
        {"prompt_lookup_min": 5},
        {"prompt_lookup_max": 1},
        {"prompt_lookup": 3},
        {"model": "ngram"},
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named(llama, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError) as error:
        LLM(llama[0], speculative_config={**DRAFTS, **options})
    text = str(error.value)
    assert "speculative_config" in text and name in text
    assert name not in DRAFTS or repr(value) in text


@pytest.mark.parametrize("missing", [{}, {"method": "ngram"}, {"prompt_lookup_max": 3}], ids=str)
def test_the_number_of_drafts_must_be_given(llama, missing):
    with pytest.raises(ValueError, match="num_speculative_tokens must be an integer in .1, 1000."):
        LLM(llama[0], speculative_config=missing)


@pytest.mark.parametrize("value", ["ngram", 3, 0, True, False, [], [("method", "ngram")], ("ngram", 3)], ids=repr)
def test_what_is_no_dict_is_refused(llama, value):
    with pytest.raises(ValueError) as error:
        LLM(llama[0], speculative_config=value)
    assert "speculative_config" in str(error.value) and repr(value) in str(error.value)


def test_a_step_in_flight_and_drafts_exclude_each_other(llama):
    with pytest.raises(ValueError, match="async_scheduling.*True"):
        LLM(llama[0], speculative_config=DRAFTS, num_gpu_blocks_override=64, async_scheduling=True)
    for wanted in (None, False):
        llm = LLM(llama[0], speculative_config=DRAFTS, async_scheduling=wanted, num_gpu_blocks_override=64)
        assert not isinstance(llm.scheduler, AsyncScheduler)


@pytest.mark.parametrize(
    "given,bounds",
    [({}, (5, 5)), (dict(max=3), (3, 3)), (dict(min=2), (2, 2)), (dict(min=2, max=3), (2, 3)), (dict(max=5), (5, 5))],
    ids=str,
)
def test_one_bound_alone_is_both_and_none_is_five(given, bounds):
    options, rng = {f"prompt_lookup_{name}": value for name, value in given.items()}, random.Random(2)
    others = [(low, high) for low in range(1, 7) for high in range(low, 7) if (low, high) != bounds]
    for _ in range(300):
        token_ids = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        drafts = NgramProposer("ngram", 3, **options).propose("r", token_ids)
        assert drafts == lookup(token_ids, 3, *bounds)
        others = [other for other in others if drafts == lookup(token_ids, 3, *other)]
    assert others == []  # the lists tell any other bounds


# What comes out of the engine


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, transformers model) of a Llama with few words."""
    config, folder = CONFIGS["llama"](), tmp_path_factory.mktemp("small")
    config.vocab_size = FEW_WORDS
    return str(folder), save_model(config, folder)


class Oracle:
    """Stands where the proposer stands and knows the answers: drafts that are right, wrong, and right after wrong ones.

    `whole` are the sequences as they should come, and beyond: it never stops by itself.
    """

    def __init__(self, outputs, vocab_size, right=0.8, num_drafts=3):
        self.rng, self.vocab_size, self.right, self.num_drafts = random.Random(4), vocab_size, right, num_drafts
        self.whole = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]

    def propose(self, request_id, token_ids):
        n, rng = len(token_ids), self.rng
        whole = next((whole for whole in self.whole if whole[:n] == token_ids), token_ids)
        right = whole[n : n + self.num_drafts]
        right += [7] * (self.num_drafts - len(right))
        drafts = [token_id if rng.random() < self.right else rng.randrange(self.vocab_size) for token_id in right]
        return drafts if self.right == 1 else drafts[: rng.randint(0, self.num_drafts)]


def make_llm(folder, oracle=None, drafts=DRAFTS, static=False, **options):
    """An engine whose every step is checked; its drafts are looked up, or the oracle's."""
    llm = LLM(folder, **{"block_size": 4, "num_gpu_blocks_override": 200, "speculative_config": drafts, **options})
    if static:
        use_scheduler(llm, StaticBatchScheduler)
    llm.seen = Counter()
    launch, update, propose, make_step = llm.runner.launch, llm.scheduler.update_from_output, None, llm._step
    if llm.drafter:
        propose = oracle.propose if oracle else llm.drafter.propose

    def checked_launch(output):
        for share in output.scheduled:
            request = llm.scheduler.requests[share.request_id]
            begin, end = share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids)
            drafts = share.token_ids[len(share.token_ids) - share.num_spec_tokens :]
            assert end < request.max_num_tokens, "the last token is never computed"
            assert share.token_ids == request.token_ids[begin:end] + drafts
        for request in llm.scheduler.waiting:
            assert not request.spec_token_ids
        return launch(output)

    def counted_update(output, sampled_token_ids):
        llm.seen["sampled tokens"] += sum(map(len, sampled_token_ids))
        return update(output, sampled_token_ids)

    def checked_propose(request_id, token_ids):
        drafts = propose(request_id, token_ids)
        if not oracle:
            bounds = llm.drafter.lengths
            assert drafts == lookup(token_ids, llm.drafter.num_speculative_tokens, bounds[0], bounds[-1])
        return drafts

    def checked_step():
        with_drafts = {request.request_id for request in llm.scheduler.running if request.spec_token_ids}
        news = make_step()
        llm.seen["preempted with drafts"] += len(with_drafts & llm.last_output.preempted_req_ids)
        check_scheduler(llm.scheduler)
        return news

    llm.runner.launch, llm.scheduler.update_from_output, llm._step = checked_launch, counted_update, checked_step
    if llm.drafter:
        llm.drafter.propose = checked_propose
    return llm


def assert_nothing_is_left(llm):
    """Blocks, rows, states and indices, once one more step has told who finished."""
    assert not llm.has_unfinished_requests() and llm.step() == []
    check_scheduler(llm.scheduler)
    llm.block_manager.check()
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert not llm._states and not llm._in_flight and not llm.runner._rows
    assert llm.drafter is None or not holds(llm.drafter)


def assert_drafts_were_right_and_wrong(llm):
    metrics = llm.get_metrics()
    assert metrics["num_drafts"] > 0 and 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]
    assert metrics["num_draft_tokens"] <= 3 * metrics["num_drafts"]


def assert_same(outputs, expected):
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        (ours,), (theirs,) = output.outputs, other.outputs
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert (ours.logprobs is None) == (theirs.logprobs is None) and output.finished
        if theirs.logprobs is not None:
            assert len(ours.logprobs) == len(ours.token_ids) == len(theirs.logprobs)
        for entries, others in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert [(i, each.rank, each.decoded_token) for i, each in entries.items()] == [
                (i, each.rank, each.decoded_token) for i, each in others.items()
            ]
            assert all(abs(each.logprob - others[i].logprob) < 1e-3 for i, each in entries.items())


def run(llm, prompts, params, stream=False, priority=None):
    """The finished outputs; of a stream too, which must have grown to them."""
    if not stream:
        return llm.generate(prompts, params, use_tqdm=False, priority=priority)
    seen: dict[str, list] = {}
    for output in llm.generate_stream(prompts, params, priority=priority):
        seen.setdefault(output.request_id, []).append(output)
    for parts in seen.values():
        for before, after in zip(parts, parts[1:], strict=False):
            old, new = before.outputs[0], after.outputs[0]
            assert new.text.startswith(old.text) and not before.finished
            assert len(new.token_ids) > len(old.token_ids) or after.finished  # half a character may end a stop string
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    return [seen[request_id][-1] for request_id in sorted(seen, key=int)]


def make_workload(num_words):
    """Prompts of every length, two with a common prefix, and every way to choose tokens side by side."""
    rng = random.Random(5)
    prompts = [[rng.randrange(2, num_words) for _ in range(n)] for n in (11, 26, 1, 17, 6)]
    prompts[3][:16] = prompts[1][:16]
    prompts.append(prompts[0][:5] * 3)
    n = 36
    return prompts, [
        greedy(n), greedy(n, logprobs=2), seeded(1, n), seeded(2, n, logprobs=0), greedy(n), seeded(3, n, top_p=0.9)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(small, llama):
    """(prompts, params, outputs without drafts) for drafts that are looked up and for the oracle's."""

    def outputs(folder, num_words):
        prompts, params = make_workload(num_words)
        llm = make_llm(folder, drafts=None)
        answers = [llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)]
        assert_nothing_is_left(llm)
        return prompts, params, answers

    return {"ngram": outputs(small[0], FEW_WORDS), "oracle": outputs(llama[0], 288)}


def options_of(chunked, preempted, caching, policy):
    options = {"max_num_batched_tokens": 9} if chunked else {}
    options |= {"num_gpu_blocks_override": 19, "max_model_len": 76} if preempted else {}
    return {**options, "enable_prefix_caching": caching, "scheduling_policy": policy}


@pytest.mark.parametrize("kind", ["ngram", "oracle"])
@pytest.mark.parametrize("chunked,preempted,caching,policy,stream", COMBINATIONS)
def test_drafts_do_not_change_outputs(small, llama, expected, kind, chunked, preempted, caching, policy, stream):
    prompts, params, answers = expected[kind]
    options = options_of(chunked, preempted, caching, policy)
    if kind == "ngram":
        llm = make_llm(small[0], drafts=EAGER, **options)
    else:
        llm = make_llm(llama[0], Oracle(answers, 288), **options)
    priority = [5, 1, 4, 2, 3, 0] if policy == "priority" else None
    assert_same(run(llm, prompts, params, stream, priority), answers)
    metrics = llm.get_metrics()
    assert_drafts_were_right_and_wrong(llm)
    assert (metrics["num_preemptions"] > 0) == preempted and (metrics["prefix_cache_hits"] > 0) == caching
    assert metrics["generation_tokens"] == llm.seen["sampled tokens"] == 36 * 6
    assert not preempted or llm.seen["preempted with drafts"] > 0
    assert_nothing_is_left(llm)


def test_drafts_do_not_change_outputs_of_any_architecture(tiny_model):
    prompts, params = make_workload(288)
    answers = make_llm(tiny_model[0], drafts=None).generate(prompts, params, use_tqdm=False)
    llm = make_llm(tiny_model[0], Oracle(answers, 288), max_num_batched_tokens=16)
    assert_same(run(llm, prompts, params), answers)
    assert_drafts_were_right_and_wrong(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_gpu_blocks_override": 700},
        {"block_size": 16},
        {"long_prefill_token_threshold": 2},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 2},
        {"max_num_seqs": 2},
        {"static": True},
    ],
    ids=str,
)
def test_drafts_do_not_change_outputs_under_other_options(llama, expected, options):
    prompts, params, answers = expected["oracle"]
    llm = make_llm(llama[0], Oracle(answers, 288), **options)
    assert_same(run(llm, prompts, params), answers)
    if options.get("max_num_batched_tokens") != 1:  # where there is no room for a draft
        assert_drafts_were_right_and_wrong(llm)
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("num_drafts", [1, 2, 7, 60])
@pytest.mark.parametrize("right", [0, 0.9, 1])
def test_drafts_of_any_number_however_often_right(llama, expected, num_drafts, right):
    prompts, params, answers = expected["oracle"]
    llm = make_llm(llama[0], Oracle(answers, 288, right, num_drafts))
    assert_same(run(llm, prompts, params), answers)
    metrics = llm.get_metrics()
    if right == 1:  # 36 tokens: the first from the prompt, then num_drafts + 1 a step
        assert metrics["num_steps"] == 1 + cdiv(35, num_drafts + 1)
        assert metrics["num_draft_tokens"] == metrics["num_accepted_tokens"] == 6 * (36 - metrics["num_steps"])
    if right == 0:  # at times a random token is right
        assert metrics["num_accepted_tokens"] < metrics["num_draft_tokens"] / 50
    assert_nothing_is_left(llm)


def test_blocks_that_accepted_drafts_filled_are_found_again(llama, expected):
    prompts, params, answers = expected["oracle"]
    llm = make_llm(llama[0], Oracle(answers, 288))
    run(llm, prompts, params)
    for i in (0, 1, 4):
        ids = answers[i].outputs[0].token_ids
        (output,) = run(llm, prompts[i] + ids[:30], greedy(6))
        assert output.num_cached_tokens == (len(prompts[i]) + 29) // 4 * 4
        assert output.outputs[0].token_ids == ids[30:]


def test_a_rejected_draft_is_no_recomputed_token(llama, expected):
    """That counts what preemptions cost."""
    prompts, params, answers = expected["oracle"]
    llm = make_llm(llama[0], Oracle(answers, 288))
    run(llm, prompts, params)
    metrics = llm.get_metrics()
    assert metrics["num_preemptions"] == metrics["recomputed_tokens"] == 0


# Where an output ends


@pytest.fixture(scope="module")
def sentence(llama):
    """A prompt and 30 tokens that follow it, without drafts."""
    llm = make_llm(llama[0], drafts=None)
    return llm.generate([9, 8, 7], greedy(30), use_tqdm=False)[0]


def stopping_params(llm, sentence):
    """Strings, ids and lengths that end `sentence` everywhere, alone and where several would in one accepted run."""
    ids, text = sentence.outputs[0].token_ids, sentence.outputs[0].text
    params = [greedy(30, stop=text[i : i + n]) for n in (1, 2, 4) for i in range(0, len(text) - n, 2)]
    params += [greedy(30, stop_token_ids=[token_id]) for token_id in set(ids)]
    params += [greedy(n) for n in range(1, 30)]
    for n in range(2, 28):  # a string that the n-th token completes, if it adds to the text
        before, after = (llm.tokenizer.decode(ids[:i], clean_up_tokenization_spaces=False) for i in (n - 1, n))
        stop = after[max(0, len(before) - 1) :]
        if stop:
            params += [greedy(30, stop=[stop], stop_token_ids=ids[n : n + 1]), greedy(n, stop=stop)]
            params += [greedy(n + 1, stop=stop), greedy(30, stop=[stop, text[-2:]], stop_token_ids=ids[n - 1 : n])]
    return [SamplingParams(**{**fields(each), "logprobs": 1 if i % 2 else None}) for i, each in enumerate(params)]


def fields(params):
    return {name: getattr(params, name) for name in inspect.signature(SamplingParams).parameters}


@pytest.mark.parametrize("stream", ON_OFF)
@pytest.mark.parametrize("right", [1, 0.8])
def test_an_output_ends_where_it_would_without_drafts(llama, sentence, right, stream):
    many = {"num_gpu_blocks_override": 2500}
    llm = make_llm(llama[0], drafts=None, **many)
    params = stopping_params(llm, sentence)
    prompts = [sentence.prompt_token_ids] * len(params)
    answers = run(llm, prompts, params)
    reasons = Counter((a.outputs[0].finish_reason, type(a.outputs[0].stop_reason)) for a in answers)
    assert reasons.keys() == {("stop", str), ("stop", int), ("length", type(None))}

    with_drafts = make_llm(llama[0], Oracle([sentence], 288, right), **many)
    assert_same(run(with_drafts, prompts, params, stream), answers)
    ours, theirs = with_drafts.get_metrics(), llm.get_metrics()
    assert ours["generation_tokens"] == theirs["generation_tokens"] == sum(len(a.outputs[0].token_ids) for a in answers)
    assert with_drafts.seen["sampled tokens"] > ours["generation_tokens"] + 50  # accepted, and cut
    assert llm.seen["sampled tokens"] < theirs["generation_tokens"] + 10  # a stop string known with the next token only
    assert ours["num_steps"] < theirs["num_steps"]
    assert_nothing_is_left(with_drafts)


def test_an_eos_in_an_accepted_run_ends_it(llama, sentence):
    ids, params = sentence.outputs[0].token_ids, SamplingParams(temperature=0, max_tokens=30, logprobs=0)
    llm, plain = make_llm(llama[0], Oracle([sentence], 288, right=1)), make_llm(llama[0], drafts=None)
    for n in range(1, 20):
        llm.scheduler.eos_token_ids = plain.scheduler.eos_token_ids = frozenset([ids[n]])
        outputs = run(llm, sentence.prompt_token_ids, params)
        assert_same(outputs, run(plain, sentence.prompt_token_ids, params))
        (ended,) = outputs[0].outputs
        assert ended.token_ids == ids[: ids.index(ids[n]) + 1]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert llm.seen["sampled tokens"] > llm.get_metrics()["generation_tokens"]
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("right", [1, 0.8])
def test_logits_that_are_not_finite_in_an_accepted_run_end_it_there(llama, sentence, right, logprobs, monkeypatch):
    prompt, ids, draw = sentence.prompt_token_ids, sentence.outputs[0].token_ids, model_runner.sample
    llm, place = make_llm(llama[0], Oracle([sentence], 288, right)), 0

    def fail_at_place(logits, asked, positions, generator):
        logits = torch.where(torch.from_numpy(positions == place)[:, None], torch.nan, logits)
        return draw(logits, asked, positions, generator)

    monkeypatch.setattr(model_runner, "sample", fail_at_place)
    for n in range(12):
        place = len(prompt) + n
        (ended,) = run(llm, prompt, greedy(30, logprobs=logprobs))[0].outputs
        assert (ended.token_ids, ended.finish_reason) == (ids[:n], "error")
        assert logprobs is None or len(ended.logprobs) == n
    assert_nothing_is_left(llm)
    monkeypatch.undo()
    assert run(llm, prompt, greedy(30))[0].outputs == sentence.outputs


def test_no_draft_goes_beyond_max_tokens(llama, sentence):
    params = [greedy(n, logprobs=1) for n in range(1, 30)]
    llm = make_llm(llama[0], Oracle([sentence], 288, right=1, num_drafts=5))
    outputs = run(llm, [sentence.prompt_token_ids] * 29, params)
    for n, output in enumerate(outputs, 1):
        assert output.outputs[0].token_ids == sentence.outputs[0].token_ids[:n]
        assert len(output.outputs[0].logprobs) == n and output.outputs[0].finish_reason == "length"
    assert llm.seen["sampled tokens"] == llm.get_metrics()["generation_tokens"] == sum(range(1, 30))
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["ngram", "oracle"])
def test_the_cache_may_be_as_small_as_one_request_that_reaches_max_model_len(small, llama, block_size, kind):
    """Drafts would not fit behind the last token, nor, most of the time, beside the other requests."""
    folder, num_words = (small[0], FEW_WORDS) if kind == "ngram" else (llama[0], 288)
    rng = random.Random(6)
    prompts = [[rng.randrange(2, num_words) for _ in range(n)] for n in (1, 39, 38, 37, 36, 20, 9, 5)]
    params = greedy(None, logprobs=0)
    limits = {"max_model_len": 40, "block_size": block_size}
    answers = run(make_llm(folder, drafts=None, **limits, num_gpu_blocks_override=400), prompts, params)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [40 - len(prompt) for prompt in prompts]
    oracle = None if kind == "ngram" else Oracle(answers, 288)
    for spare in (0, 1, 5):
        num_blocks = cdiv(39, block_size) + spare
        llm = make_llm(folder, oracle, drafts=EAGER, **limits, num_gpu_blocks_override=num_blocks)
        assert_same(run(llm, prompts, params), answers)
        assert_drafts_were_right_and_wrong(llm)
        assert llm.seen["sampled tokens"] == llm.get_metrics()["generation_tokens"]
        assert_nothing_is_left(llm)


# Who loses drafts


def test_a_preempted_request_loses_its_drafts():
    scheduler = make_scheduler(num_blocks=4, block_size=2, caching=False)
    first, second = make_request("first", 3), make_request("second", 3)
    step(scheduler, first, second)  # two blocks each, one place left in each
    scheduler.update_draft_token_ids({"first": [1, 2], "second": [3, 4]})
    output = scheduler.schedule()
    assert [(s.request_id, s.token_ids[1:], s.num_spec_tokens) for s in output.scheduled] == [("first", [1, 2], 2)]
    assert output.preempted_req_ids == {"second"} and second.spec_token_ids == []
    scheduler.update_draft_token_ids({"second": [5, 6]})  # proposed too late: it has lost its place
    assert second.spec_token_ids == []
    scheduler.update_from_output(output, [[1, 2, 9]])
    scheduler.abort_request("first")
    output = scheduler.schedule()
    assert [(s.token_ids, s.num_spec_tokens) for s in output.scheduled] == [(second.token_ids, 0)]
    check_scheduler(scheduler)


def test_drafts_are_verified_once():
    scheduler, request = make_scheduler(), make_request("r", 3)
    step(scheduler, request)
    scheduler.update_draft_token_ids({"r": [1, 2]})
    scheduler.update_from_output(scheduler.schedule(), [[1, 5]])  # the second was wrong
    (share,) = scheduler.schedule().scheduled
    assert (share.token_ids, share.num_spec_tokens, share.num_computed_tokens) == ([5], 0, 5)


def test_drafts_for_an_aborted_request_are_dropped():
    scheduler = make_scheduler()
    request, other = make_request("r", 3), make_request("other", 3)
    step(scheduler, request, other)
    scheduler.update_draft_token_ids({"r": [1, 2], "other": [3]})
    scheduler.abort_request("r")
    scheduler.update_draft_token_ids({"r": [1, 2], "nobody": [4]})
    assert [(s.request_id, s.token_ids[1:]) for s in scheduler.schedule().scheduled] == [("other", [3])]


def test_an_aborted_requests_id_finds_only_the_new_tokens(small, expected):
    """The old tokens are longer, so an index that stayed would look complete."""
    prompts, _, answers = expected["ngram"]
    llm = make_llm(small[0], drafts=EAGER)
    outputs = []
    for at, (prompt, answer) in enumerate([(prompts[4], answers[4]), (prompts[0], answers[0])]):
        llm.add_request("r", prompts[1], greedy(36))
        llm.add_request("other", prompts[1], greedy(36))
        for _ in range(3 + at):
            llm.step()
        assert len(llm.scheduler.requests["r"].output_token_ids) > 2
        llm.abort_request("r")
        llm.add_request("r", prompt, greedy(36))  # before any step has told the drafter
        last = {}
        while llm.has_unfinished_requests():
            last |= {output.request_id: output for output in llm.step()}
        outputs.append(last["r"])
        assert_same([last["r"]], [answer])
        llm.add_request("other", prompt, greedy(36))  # and one that had finished
        while llm.has_unfinished_requests():
            last |= {output.request_id: output for output in llm.step()}
        assert_same([last["other"]], [answer])
    llm.add_request("r", prompts[1], greedy(36))
    llm.step()
    llm.step()
    llm.abort_request("r")
    assert_nothing_is_left(llm)


def test_closing_a_stream_leaves_no_drafts(small, expected):
    prompts, params, _ = expected["ngram"]
    llm = make_llm(small[0], drafts=EAGER)
    stream = llm.generate_stream(prompts, params)
    while not llm.get_metrics()["num_accepted_tokens"]:
        next(stream)
    stream.close()
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("kind", ["ngram", "oracle"])
def test_a_failed_step_with_drafts_is_run_again_without_a_trace(small, llama, expected, kind):
    prompts, params, answers = expected[kind]
    if kind == "ngram":
        llm = make_llm(small[0], drafts=EAGER)
    else:
        llm = make_llm(llama[0], Oracle(answers, 288))
    compute, calls, outputs = llm.runner._compute, Counter(), {}

    def fail_at_times(*args):
        calls["all"] += 1
        result = compute(*args)  # K/V is written, drafts' too
        if calls["all"] % 4 == 0:
            calls["failed with drafts"] += any(share.num_spec_tokens for share in llm.last_output.scheduled)
            raise RuntimeError("out of memory")
        return result

    llm.runner._compute = fail_at_times
    for i, each in enumerate(zip(prompts, params, strict=True)):
        llm.add_request(str(i), *each)
    while llm.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in llm.step()}
        except RuntimeError:
            check_scheduler(llm.scheduler)
    assert_same([outputs[str(i)] for i in range(len(prompts))], answers)
    assert calls["failed with drafts"] > 0
    assert_drafts_were_right_and_wrong(llm)
    llm.runner._compute = compute
    assert_nothing_is_left(llm)


# Draws


@pytest.fixture(scope="module")
def chances(small):
    """The model's own distribution of the next token after PROMPT and any three or fewer tokens more."""
    probs = {}
    for n in range(4):
        more = list(product(range(FEW_WORDS), repeat=n))
        with torch.no_grad():
            logits = small[1](torch.tensor([PROMPT + list(each) for each in more])).logits[:, -1]
        probs |= dict(zip(more, logits.double().softmax(-1).tolist(), strict=True))
    return probs


@pytest.mark.parametrize("place", [0, 2], ids=["often right", "often wrong"])
def test_unseeded_draws_have_the_models_distribution(small, chances, place):
    """4 tokens each of 20,000 requests, against the model's exact probabilities given the tokens before them.

    Chi-square at each position may be 5 standard deviations above what is expected. Drafts are the likeliest tokens, or
    the third likeliest, one after the other.
    """

    def propose(request_id, token_ids):
        drafts = list(token_ids[len(PROMPT) :])
        begin = len(drafts)
        while len(drafts) < 4:
            probs = chances[tuple(drafts)]
            drafts.append(sorted(range(FEW_WORDS), key=lambda token_id: -probs[token_id])[place])
        return drafts[begin:]

    llm = LLM(
        small[0], block_size=16, num_gpu_blocks_override=2000, max_num_seqs=2000, enable_prefix_caching=False,
        speculative_config=DRAFTS,
    )  # fmt: skip
    llm.drafter.propose = propose
    params = SamplingParams(temperature=1, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([PROMPT] * DRAWS, params, use_tqdm=False)
    metrics = llm.get_metrics()
    share = metrics["num_accepted_tokens"] / metrics["num_draft_tokens"]
    assert share > 0.3 if place == 0 else 0.01 < share < 0.2
    draws = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    for position in range(4):
        counts = Counter()
        for tokens, count in draws.items():
            counts[tokens[:position], tokens[position]] += count
        assert_distributed(counts, chances, position)
    assert_nothing_is_left(llm)


def assert_distributed(counts, chances, position):
    totals = Counter()
    for (before, _), count in counts.items():
        totals[before] += count
    assert sum(totals.values()) == DRAWS
    observed, expected, mean = [0.0], [0.0], 1.0  # cells expected under 10 times count as one
    for before, total in totals.items():
        for token_id, prob in enumerate(chances[before]):
            if prob * total < 10:
                observed[0] += counts[before, token_id]
                expected[0] += prob * total
            else:
                observed.append(counts[before, token_id])
                expected.append(prob * total)
                mean += 1 - prob
    observed, expected = np.array(observed), np.array(expected)
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1)).sum()
    assert len(expected) > 4 and chi_square < mean + 5 * sqrt(2 * mean), (position, chi_square, mean)


# The demo model


@pytest.fixture(scope="module")
def demo_answers(demo_folder):
    prompts = [
        "The cat sat on the mat. The dog sat on the mat. The cat sat on the",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef div(a, b):\n",
        "1, 2, 3, 4, 5, 6, 7,",
    ]
    params = [greedy(20), greedy(20, logprobs=1), greedy(20), seeded(1, 20)]
    return prompts, params, run(make_llm(demo_folder, drafts=None, max_model_len=256), prompts, params)


@pytest.mark.demo
@pytest.mark.parametrize("chunked,preempted,caching,policy", [each[:4] for each in COMBINATIONS if not each[4]][::6])
def test_drafts_do_not_change_the_demo_models_outputs(demo_folder, demo_answers, chunked, preempted, caching, policy):
    prompts, params, answers = demo_answers
    options = {"max_model_len": 256, **options_of(chunked, preempted, caching, policy)}
    options |= {"max_model_len": 120, "num_gpu_blocks_override": 30} if preempted else {}
    llm = make_llm(demo_folder, **options)
    priority = [3, 1, 2, 0] if policy == "priority" else None
    for stream in ON_OFF:
        assert_same(run(llm, prompts, params, stream, priority), answers)
    metrics = llm.get_metrics()
    assert_drafts_were_right_and_wrong(llm)
    assert (metrics["num_preemptions"] > 0) == preempted and (metrics["prefix_cache_hits"] > 0) == caching
    assert_nothing_is_left(llm)
