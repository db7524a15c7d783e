"""What comes back while requests run: streams, stop strings, logprobs, metrics, and the API shared with vLLM."""

import subprocess
import sys
import threading
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams


def greedy(n=12, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def llm(llama):
    return LLM(llama[0], block_size=4, num_gpu_blocks_override=64, max_num_batched_tokens=16)


def one(llm, prompt, params):
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_a_stream_grows_to_what_generate_returns(llm):
    expected = llm.generate(["hello world", "one two"], greedy(), use_tqdm=False)
    seen: dict[str, list] = {}
    for output in llm.generate_stream(["hello world", "one two"], greedy()):
        seen.setdefault(output.request_id, []).append(output.outputs[0])
    assert len(seen) == 2
    for growing, whole in zip(seen.values(), expected, strict=True):
        assert [len(part.token_ids) for part in growing] == list(range(1, 13))
        for before, after in zip(growing, growing[1:], strict=False):
            assert after.text.startswith(before.text) and before.finish_reason is None
        assert growing[-1].text == whole.outputs[0].text and growing[-1].finish_reason == "length"


def test_closing_a_stream_aborts_its_requests_only(llm):
    llm.add_request("other", [5, 6], greedy())
    stream = llm.generate_stream(["hello", "world"], greedy())
    next(stream)
    stream.close()
    assert list(llm.scheduler.requests) == ["other"]
    llm.abort_request("other")
    assert llm.block_manager.num_free_blocks == 64
    with pytest.raises(ValueError):
        llm.generate_stream([[]])  # refused at the call, before anybody iterates


def test_two_streams_and_a_request_share_the_steps(llm):
    expected = [one(llm, prompt, greedy()).outputs[0].token_ids for prompt in ("hello", "world", "fox")]
    llm.add_request("third", "fox", greedy())
    first, second = llm.generate_stream("hello", greedy()), llm.generate_stream("world", greedy())
    pairs = list(zip_longest(first, second))  # each step of one moves the other too
    for i in range(2):
        (whole,) = [pair[i] for pair in pairs if pair[i] and pair[i].finished]
        assert whole.outputs[0].token_ids == expected[i]
    (third,) = llm.step()  # what ran beside them is returned to whoever steps
    assert third.finished and third.outputs[0].token_ids == expected[2]
    assert not llm.has_unfinished_requests()


def test_a_step_returns_what_was_added_and_not_what_a_stream_waits_for(llm):
    llm.add_request("mine", "fox", greedy(3))
    stream = llm.generate_stream("hello", greedy(3))
    first = next(stream)
    outputs = [output for _ in range(3) for output in llm.step()]
    assert {output.request_id for output in outputs} == {"mine"} and outputs[-1].finished
    rest = list(stream)  # it has all been computed beside the steps
    assert [first.request_id, *(output.request_id for output in rest)].count("mine") == 0 and rest[-1].finished
    assert not llm.has_unfinished_requests()


def test_a_stream_whose_id_was_taken_before_it_began_fails_alone(llm):
    expected = one(llm, "fox", greedy()).outputs[0].token_ids
    stream = llm.generate_stream("hello", greedy())  # holds an id, and queues when it is iterated
    taken = str(next(llm._ids) - 1)
    llm.add_request(taken, "fox", greedy())
    with pytest.raises(ValueError, match=f"request_id .* got '{taken}'"):
        next(stream)
    assert list(llm.scheduler.requests) == [taken]
    while llm.has_unfinished_requests():
        (output,) = llm.step()
    assert output.request_id == taken and output.outputs[0].token_ids == expected


def test_of_two_threads_that_add_the_same_id_one_is_refused_and_nobody_is_disturbed(llm, monkeypatch):
    llm.add_request("bystander", "fox", greedy())
    llm.step()
    real, together, calls, refused = llm.scheduler.check_request, threading.Barrier(2), threading.local(), []

    def check(request):  # when a request is made, before it is queued, and as it is
        calls.count = getattr(calls, "count", 0) + 1
        result = real(request)
        if calls.count == 2:  # both have passed, if they can
            with suppress(threading.BrokenBarrierError):
                together.wait(0.3)
        return result

    def add():
        try:
            llm.add_request("same", "hello", greedy())
        except ValueError as error:
            refused.append(str(error))

    monkeypatch.setattr(llm.scheduler, "check_request", check)
    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(refused) == 1 and "request_id" in refused[0]
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs.keys() == {"bystander", "same"} and not llm._states
    assert [output.metrics.num_preemptions for output in outputs.values()] == [0, 0]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_text_before_it_and_is_never_shown(llm, length):
    whole = one(llm, "the lazy dog", greedy(30)).outputs[0].text
    stop = whole[7 : 7 + length]
    shown = [o.outputs[0] for o in llm.generate_stream("the lazy dog", greedy(30, stop=stop))]
    assert shown[-1].text == whole[: whole.find(stop)]
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == ("stop", stop)
    assert all(shown[-1].text.startswith(part.text) for part in shown)
    assert len(shown[-1].token_ids) < 30 and not llm.has_unfinished_requests()


def test_a_stop_string_completed_by_the_last_token_counts_as_a_stop(llm):
    texts = [one(llm, "the lazy dog", greedy(n)).outputs[0].text for n in range(1, 13)]
    n = next(
        n for n in range(2, 12) if texts[n].find(texts[n][len(texts[n - 1]) :]) == len(texts[n - 1]) < len(texts[n])
    )
    stop = texts[n][len(texts[n - 1]) :]
    output = one(llm, "the lazy dog", greedy(n + 1, stop=[stop])).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (texts[n - 1], "stop", stop)


def test_an_eos_is_no_stop_reason_and_a_stop_token_id_is(llm):
    third = one(llm, "hello", greedy()).outputs[0].token_ids[2]
    by_id = one(llm, "hello", greedy(stop_token_ids=[third])).outputs[0]
    assert (by_id.finish_reason, by_id.stop_reason, by_id.token_ids[-1]) == ("stop", third, third)
    assert by_id.text == one(llm, "hello", greedy(2)).outputs[0].text  # its text is left out, its id is not
    llm.scheduler.eos_token_ids, before = frozenset([third]), llm.scheduler.eos_token_ids
    try:
        by_eos = one(llm, "hello", SamplingParams(temperature=0, max_tokens=12)).outputs[0]
    finally:
        llm.scheduler.eos_token_ids = before
    assert (by_eos.finish_reason, by_eos.stop_reason, by_eos.token_ids) == ("stop", None, by_id.token_ids)


def test_logprobs_are_the_models_own(llama):
    folder, model = llama
    llm = LLM(folder, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, logprobs=3, ignore_eos=True)
    output = one(llm, [5, 6, 7], params)
    ids = output.outputs[0].token_ids
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1].log_softmax(-1)
    assert len(output.outputs[0].logprobs) == 6
    for token_id, entries, row in zip(ids, output.outputs[0].logprobs, expected, strict=True):
        assert next(iter(entries)) == token_id  # the sampled one first
        assert set(entries) == {token_id, *row.topk(3).indices.tolist()}
        for i, entry in entries.items():
            assert abs(entry.logprob - row[i]) < 1e-4
            assert entry.rank == (row > row[i]).sum() + 1
            assert entry.decoded_token == llm.tokenizer.decode([i])
    assert one(llm, [5, 6, 7], greedy(2)).outputs[0].logprobs is None


def test_a_seeded_request_gives_the_same_tokens_however_it_is_run(llama):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    prompt = list(range(20, 50))
    alone = one(LLM(llama[0], num_gpu_blocks_override=64), prompt, params).outputs[0].token_ids
    for options in (
        {"max_num_batched_tokens": 7},
        {"block_size": 4, "num_gpu_blocks_override": 20, "max_model_len": 64},
    ):
        llm = LLM(llama[0], **{"num_gpu_blocks_override": 64, **options})
        outputs = llm.generate([[9], [8, 8], prompt], [other, other, params], use_tqdm=False)
        assert outputs[2].outputs[0].token_ids == alone
    assert outputs[2].metrics.num_preemptions > 0
    unseeded = [one(llm, prompt, SamplingParams(temperature=1.0, max_tokens=20)).outputs[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_metrics_count_tokens_steps_and_hits_once(llama):
    llm = LLM(llama[0], block_size=4, num_gpu_blocks_override=12, max_model_len=40, max_num_batched_tokens=16)
    params = greedy(20)
    outputs = llm.generate([list(range(10, 26)), list(range(10, 19))], params, use_tqdm=False)
    metrics = llm.get_metrics()
    assert metrics["prompt_tokens"] == 25 and metrics["generation_tokens"] == 40
    assert metrics["num_preemptions"] == sum(o.metrics.num_preemptions for o in outputs) > 0
    assert (
        metrics["prefix_cache_hits"] == 8
    )  # the second prompt's two full blocks, once, however often it was preempted
    assert metrics["prefix_cache_queries"] == 25
    assert metrics["kv_cache_usage"] == 0 and metrics["num_requests_running"] == 0
    assert metrics["num_steps"] == llm.last_output.step + 1
    assert 0 < metrics["recomputed_tokens"] < 36 * metrics["num_preemptions"]


def test_the_script_for_vllm_runs_here(llama):
    script = Path(__file__).with_name("offline_api.py")
    run = subprocess.run(
        [sys.executable, str(script), llama[0], "num_gpu_blocks_override=64"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("the offline API works\n")
