"""A script for vLLM's offline API: it runs under vLLM and under nanoserve with this one import changed.

python tests/offline_api.py MODEL [OPTION=NUMBER ...]
"""

import sys

from nanoserve import LLM, SamplingParams


def main(model: str, **options: int) -> None:
    llm = LLM(model=model, max_num_seqs=8, enforce_eager=True, scheduling_policy="priority", seed=0, **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    text = llm.generate(["hello world", "the quick brown"], greedy, use_tqdm=False)
    for output in text:
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 12
        print(repr(output.prompt), repr(output.outputs[0].text))

    ids = llm.generate({"prompt_token_ids": list(text[0].prompt_token_ids)}, greedy, use_tqdm=False)
    assert list(ids[0].outputs[0].token_ids) == list(text[0].outputs[0].token_ids)

    (answer,) = llm.chat([{"role": "user", "content": "how are you"}], greedy, use_tqdm=False)
    assert answer.outputs[0].text

    several = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(["one", "two", "three"], several, use_tqdm=False, priority=[2, 0, 1])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]

    whole = text[0].outputs[0].text
    stop = whole[3:5]
    cut = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop, "never said"])
    completion = llm.generate("hello world", cut, use_tqdm=False)[0].outputs[0]
    assert completion.text == whole[: whole.find(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

    third = text[0].outputs[0].token_ids[2]
    by_id = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[third])
    completion = llm.generate("hello world", by_id, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids[-1] == completion.stop_reason == third and completion.finish_reason == "stop"

    likely = SamplingParams(temperature=0.0, max_tokens=3, logprobs=4, ignore_eos=True)
    completion = llm.generate("hello world", likely, use_tqdm=False)[0].outputs[0]
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(logprobs) == 4 and logprobs[token_id].rank == 1
        assert logprobs[token_id].logprob == max(entry.logprob for entry in logprobs.values()) <= 0

    seeded = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=7, max_tokens=12, ignore_eos=True)
    alone = llm.generate("hello world", seeded, use_tqdm=False)[0].outputs[0].token_ids
    batch = llm.generate(["one", "hello world", "two"], seeded, use_tqdm=False)[1].outputs[0].token_ids
    assert list(alone) == list(batch)
    print("the offline API works")


if __name__ == "__main__":
    main(sys.argv[1], **{name: int(value) for name, _, value in (arg.partition("=") for arg in sys.argv[2:])})
