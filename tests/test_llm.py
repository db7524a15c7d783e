"""LLM as its callers use it: prompts of every kind, bad input, and an engine that is whole after each error."""

import pytest
from helpers_scheduler import check_scheduler

from nanoserve import LLM, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama):
    return LLM(llama[0], block_size=4, num_gpu_blocks_override=16, max_model_len=100)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_prompts_of_every_kind_give_the_same_answer(llm):
    text = "hello world"
    ids = llm.tokenizer(text)["input_ids"]
    kinds = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(kinds, SHORT, use_tqdm=False)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    for prompt in kinds:
        assert texts(llm.generate(prompt, SHORT, use_tqdm=False)) == texts(outputs[:1])
    assert llm.generate([], SHORT, use_tqdm=False) == []


def test_results_come_in_the_order_of_the_prompts_each_with_its_own_params(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 1, 3, 2)]
    prompts = [[n, n + 1] for n in (10, 20, 30, 40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 1, 3, 2]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_chat_is_the_template_and_nothing_more(llm):
    messages = [{"role": "user", "content": "how are you"}]
    (output,) = llm.chat(messages, SHORT, use_tqdm=False, chat_template_kwargs={"style": "brief"})
    assert output.prompt == "<s><|user|>how are you\n<|assistant|>[brief]"
    assert output.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    both = llm.chat([messages, messages], SHORT, use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in both] == ["<s><|user|>how are you\n"] * 2


def test_metrics_are_in_order(llm):
    (output,) = llm.generate([7, 8, 9], SHORT, use_tqdm=False)
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


def test_requests_join_and_leave_at_every_step(llm):
    expected = [llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids for prompt in ([5, 6], [7], [8, 9])]
    llm.add_request("a", [5, 6], SHORT)
    seen = {"a": llm.step()[0].outputs[0].token_ids}
    llm.add_request("b", [7], SHORT)
    llm.add_request("c", [8, 9], SHORT)
    llm.step()
    llm.abort_request("c")
    while llm.has_unfinished_requests():
        seen |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    assert seen["a"] == expected[0] and seen["b"] == expected[1] and "c" not in seen
    assert llm.block_manager.num_free_blocks == 16


def test_generate_numbers_its_requests_around_those_that_are_there(llm):
    taken = [str(i) for i in range(1000)]
    for name in taken[:3]:
        llm.add_request(name, [5], SHORT, arrival_time=12.5)
    llm._ids = iter(range(1000))
    (output,) = llm.generate([5], SHORT, use_tqdm=False)
    assert output.request_id == "3"
    assert {output.request_id for output in llm.step() if output.finished} == {"0", "1", "2"}  # for who added them
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    "call,names",
    [
        (lambda llm: llm.generate([[]], SHORT), ["0", "max_model_len=100"]),
        (lambda llm: llm.generate("", SHORT), ["0"]),
        (lambda llm: llm.generate([1] * 100, SHORT), ["100", "max_model_len=100"]),
        (lambda llm: llm.generate([1] * 70, SHORT), ["19", "16", "K/V blocks"]),
        (lambda llm: llm.generate([[5], [1] * 70], SHORT), ["19", "16", "K/V blocks"]),
        (lambda llm: llm.generate([5], SamplingParams(max_tokens=0)), ["max_tokens", "0"]),
        (lambda llm: llm.generate([5, 288], SHORT), ["288"]),
        (lambda llm: llm.generate([5, -1], SHORT), ["-1"]),
        (lambda llm: llm.generate([5, "x"], SHORT), ["token ids", "x"]),
        (lambda llm: llm.generate([[5], None], SHORT), ["prompt", "None"]),
        (lambda llm: llm.generate({"text": "x"}, SHORT), ["prompt", "text"]),
        (lambda llm: llm.generate([[5], [6]], [SHORT]), ["sampling_params", "1", "2"]),
        (lambda llm: llm.generate([[5], [6]], [SHORT, None]), ["sampling_params"]),
        (lambda llm: llm.generate([[5], [6]], SHORT, priority=[1, 2]), ["priority", "fcfs"]),
        (lambda llm: llm.chat([{"role": "user"}, 7], SHORT), ["template"]),
    ],
)
def test_bad_input_is_a_value_error_and_the_engine_answers_on(llm, call, names):
    before = llm.generate([5, 6, 7], SHORT, use_tqdm=False)
    with pytest.raises(ValueError) as error:
        call(llm)
    assert all(name in str(error.value) for name in names), error.value
    assert not llm.has_unfinished_requests()
    check_scheduler(llm.scheduler)
    assert texts(llm.generate([5, 6, 7], SHORT, use_tqdm=False)) == texts(before)


@pytest.mark.parametrize(
    "options,names",
    [
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size", "max_num_seqs"]),
        ({"hf_config": None}, ["hf_config"]),
        ({"dtype": "int8"}, ["dtype", "int8", "float32"]),
        ({"max_model_len": 513}, ["513", "512"]),
        ({"max_model_len": 1}, ["max_model_len", "1", "2"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"block_size": 2.0}, ["block_size", "2.0"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
        ({"scheduling_policy": "sjf"}, ["scheduling_policy", "sjf", "fcfs"]),
        ({"attention_backend": "flash_attn"}, ["flash_attn", "CUDA"]),
        ({"enforce_eager": "no"}, ["enforce_eager", "no"]),
        ({"seed": None}, ["seed", "None"]),
    ],
)
def test_bad_options_are_value_errors(llama, options, names):
    with pytest.raises(ValueError) as error:
        LLM(llama[0], **options)
    assert all(name in str(error.value) for name in names), error.value


def test_a_failed_step_leaves_no_trace(llm, monkeypatch):
    expected = texts(llm.generate([[5, 6, 7, 8, 9], [6, 7]], SHORT, use_tqdm=False))
    forward, calls = llm.runner.model.forward, []

    def fail_on_third(*args):
        calls.append(len(args))
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(llm.runner.model, "forward", fail_on_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate([[5, 6, 7, 8, 9], [6, 7]], SHORT, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    check_scheduler(llm.scheduler)
    assert texts(llm.generate([[5, 6, 7, 8, 9], [6, 7]], SHORT, use_tqdm=False)) == expected
    calls.clear()
    llm.add_request("x", [5, 6, 7, 8, 9], SHORT)
    llm.step(), llm.step()
    with pytest.raises(RuntimeError):
        llm.step()
    outputs = []
    while llm.has_unfinished_requests():  # the step is run again, as after a preemption
        outputs = llm.step()
    assert texts(outputs) == expected[:1] and outputs[0].metrics.num_preemptions == 1


def test_padded_vocabulary_rows_are_never_sampled(tmp_path):
    from tiny_models import CONFIGS, save_model

    config = CONFIGS["llama"]()
    config.vocab_size = 400  # the tokenizer has 288
    save_model(config, tmp_path)
    llm = LLM(str(tmp_path), num_gpu_blocks_override=64)
    outputs = llm.generate(
        [[i] for i in range(20, 28)], SamplingParams(temperature=5.0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    ids = [i for output in outputs for i in output.outputs[0].token_ids]
    assert len(ids) == 320 and max(ids) < 288


def test_an_eos_of_the_generation_config_ends_the_output(llama, tmp_path):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(llama[0], folder)
    first = LLM(str(folder), num_gpu_blocks_override=64).generate([5, 6, 7], SHORT, use_tqdm=False)[0].outputs[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, first.token_ids[2]]}))
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    output = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == first.token_ids[:3] and output.finish_reason == "stop"
    ignoring = llm.generate([5, 6, 7], SHORT, use_tqdm=False)[0].outputs[0]
    assert ignoring.token_ids == first.token_ids
