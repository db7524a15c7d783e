"""It survives: interrupts, failing steps, bad arguments, logits that are not finite, overload and threads.

Every test ends with an engine as it was before: the right tokens, all blocks free, nothing left in any container.
NANOSERVE_SURVIVES=full tries every place of an interrupt instead of a sample.
"""

import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_scheduler import check_scheduler
from tiny_models import SIZES, save_model
from transformers import LlamaConfig

import nanoserve
import nanoserve.llm as llm_module
import nanoserve.model_runner as runner_module
from nanoserve import LLM, SamplingParams
from nanoserve.block_manager import cdiv
from nanoserve.config import EngineConfig
from nanoserve.detokenizer import Detokenizer

FULL = os.environ.get("NANOSERVE_SURVIVES") == "full"
PACKAGE = str(Path(nanoserve.__file__).parent)
DRAFTS = dict(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
MODES = {
    "sync": dict(async_scheduling=False),
    "async": dict(async_scheduling=True),
    "drafts": dict(speculative_config=DRAFTS),
}
modes = pytest.mark.parametrize("mode", MODES)


def greedy(n, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


def seeded(n, seed, **more):
    return SamplingParams(temperature=1, seed=seed, max_tokens=n, ignore_eos=True, **more)


OTHER = [5, 6, 7, 8, 9, 5, 6, 7], greedy(40, logprobs=1)
BESIDE = [40, 41, 42] * 3, seeded(10, 3)
A, B = [9, 9, 9], [30, 31, 32, 33, 34]
GENERATE = [(A, greedy(6, logprobs=2)), (B, seeded(7, 4, stop="~~~")), ([11] * 14, greedy(4))]
PROMPTS, PARAMS = [prompt for prompt, _ in GENERATE], [params for _, params in GENERATE]


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a Llama of one layer."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    save_model(LlamaConfig(**sizes), folder)
    return str(folder)


def make(folder, mode="sync", **options):
    options = dict(block_size=4, num_gpu_blocks_override=20, max_model_len=64, max_num_batched_tokens=12) | options
    llm = LLM(folder, **{"max_num_seqs": 5, **MODES[mode], **options})
    llm.fresh = containers(llm)
    return llm


def containers(llm) -> dict[str, int]:
    """The length of everything that could grow, but for the prefix cache, which has a name for each block at most."""
    parts = {"llm": llm, "scheduler": llm.scheduler, "blocks": llm.block_manager, "runner": llm.runner}
    parts |= {"drafter": llm.drafter} if llm.drafter else {}
    kinds, skipped = (list, dict, set, deque), ("_cached", "fresh", "_counters")
    return {
        f"{part}.{name}": len(value)
        for part, owner in parts.items()
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and name not in skipped
    }


def assert_whole(llm) -> None:
    assert not llm.has_unfinished_requests() and llm.step() == []
    check_scheduler(llm.scheduler)
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert containers(llm) == llm.fresh


def answer(output) -> tuple:
    one = output.outputs[0]
    logprobs = one.logprobs and [list(entries) for entries in one.logprobs]
    return output.finished, one.token_ids, one.text, one.finish_reason, one.stop_reason, logprobs


def answers(llm, prompts, params) -> list[tuple]:
    return [answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(small):
    """What each request gives where nothing happens to it, by its prompt."""
    llm = make(small, num_gpu_blocks_override=100)
    return {tuple(prompt): answers(llm, prompt, params)[0] for prompt, params in (OTHER, BESIDE, *GENERATE)}


def assert_answers_on(llm, expected) -> None:
    assert_whole(llm)
    assert answers(llm, PROMPTS, PARAMS) == [expected[tuple(prompt)] for prompt in PROMPTS]
    assert_whole(llm)


class EndlessLoop(Exception):
    pass


def limit_steps(llm, most: int) -> None:
    """Fail, instead of hanging, whoever steps for something that never comes."""
    schedule, left = type(llm.scheduler).schedule, iter(range(most))

    def limited():
        if next(left, None) is None:
            raise EndlessLoop(f"more than {most} steps")
        return schedule(llm.scheduler)

    llm.scheduler.schedule = limited


def finish(llm, outputs=None) -> dict:
    """Step until nobody is left; the last output of each request, which is finished once."""
    outputs = {} if outputs is None else outputs
    while llm.has_unfinished_requests():
        for output in llm.step():
            assert not (output.request_id in outputs and outputs[output.request_id].finished), "finished twice"
            outputs[output.request_id] = output
    return outputs


# Interrupts.

SITES: dict[str, Callable] = {
    "schedule": lambda llm: (llm.scheduler, "schedule"),
    "get_computed_blocks": lambda llm: (llm.block_manager, "get_computed_blocks"),
    "allocate_slots": lambda llm: (llm.block_manager, "allocate_slots"),
    "free": lambda llm: (llm.block_manager, "free"),
    "launch": lambda llm: (llm.runner, "launch"),
    "_update_rows": lambda llm: (llm.runner, "_update_rows"),
    "_pack": lambda llm: (llm.runner, "_pack"),
    "_forward": lambda llm: (llm.runner, "_forward"),
    "sample": lambda llm: (runner_module, "sample"),
    "_result": lambda llm: (runner_module, "_result"),
    "update_from_output": lambda llm: (llm.scheduler, "update_from_output"),
    "finish_request": lambda llm: (llm.scheduler, "finish_request"),
    "_count": lambda llm: (llm, "_count"),
    "_read": lambda llm: (llm, "_read"),
    "append": lambda llm: (Detokenizer, "append"),
    "output": lambda llm: (llm_module._RequestState, "output"),
    "propose": lambda llm: (llm.drafter, "propose"),
    "update_draft_token_ids": lambda llm: (llm.scheduler, "update_draft_token_ids"),
    "forget": lambda llm: (llm.drafter, "forget"),
}


class Interrupt:
    """Ctrl-C at the `at`-th call of a site, before it begins or when it has just ended; counts the calls."""

    def __init__(self, owner, name: str, at: int, after: bool):
        self.place, self.function, self.at, self.after = (owner, name), getattr(owner, name), at, after
        self.own, self.num_calls, self.on = name in vars(owner), 0, True

    def __enter__(self):
        def run(*args, **more):
            self.num_calls += self.on
            now = self.on and self.num_calls == self.at
            if now and not self.after:
                raise KeyboardInterrupt
            result = self.function(*args, **more)
            if now:
                raise KeyboardInterrupt
            return result

        setattr(*self.place, run)
        return self

    def __exit__(self, *_):
        setattr(*self.place, self.function) if self.own else delattr(*self.place)


def sites_of(mode: str) -> list[str]:
    """Without those that do not occur, and those where no signal comes: it comes to the main thread."""
    drafts, worker = {"propose", "forget", "update_draft_token_ids"}, {"_forward", "sample"}
    return [site for site in SITES if mode == "drafts" or site not in drafts if mode != "async" or site not in worker]


modes_and_sites = pytest.mark.parametrize("mode,site", [(mode, site) for mode in MODES for site in sites_of(mode)])


def interrupted_generate(llm, site, at, after) -> tuple:
    """generate() interrupted beside a stream and a request of step(); these two, and how often the site was called."""
    limit_steps(llm, 400)
    llm.add_request("other", *OTHER)
    other, stream = llm._states["other"], llm.generate_stream(*BESIDE)
    next(stream)
    with Interrupt(*SITES[site](llm), at, after) as interrupt:
        try:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        except KeyboardInterrupt:
            assert at
    return other, stream, interrupt.num_calls


def when(total: int) -> list[int]:
    return [*range(1, total + 1)] if FULL else sorted({1, total} - {0})


@modes_and_sites
def test_generate_interrupted_anywhere_leaves_nothing_and_the_others_go_on(small, expected, mode, site):
    llm = make(small, mode)

    def run(at: int, after: bool) -> int:
        other, stream, num_calls = interrupted_generate(llm, site, at, after)
        mine = {state.request.request_id for state in llm._states.values()} | {"other"}
        assert set(llm.scheduler.requests) <= mine and len(mine) <= 2, f"call {at}, {after=}: {mine}"
        assert answer([*stream][-1]) == expected[tuple(BESIDE[0])], f"call {at}, {after=}"
        finish(llm)
        assert answer(other.output()) == expected[tuple(OTHER[0])], f"call {at}, {after=}"
        llm.step()
        assert_whole(llm)
        return num_calls

    total = run(0, False)
    assert total or site == "finish_request"  # nobody's stop string comes
    for at in when(total):
        run(at, False), run(at, True)
    assert_answers_on(llm, expected)


@modes_and_sites
def test_after_an_interrupted_step_every_request_comes_out_finished_once(small, expected, mode, site):
    llm = make(small, mode, num_gpu_blocks_override=15)

    def run(at: int, after: bool) -> int:
        outputs = {}
        limit_steps(llm, 400)
        for name, (prompt, params) in enumerate(GENERATE):
            llm.add_request(str(name), prompt, params)
        with Interrupt(*SITES[site](llm), at, after) as interrupt:
            try:
                finish(llm, outputs)
            except KeyboardInterrupt:
                interrupt.on = False
                finish(llm, outputs)
        got = [answer(outputs[str(name)]) for name in range(3)]
        assert got == [expected[tuple(prompt)] for prompt in PROMPTS], f"call {at}, {after=}"
        assert_whole(llm)
        return interrupt.num_calls

    total = run(0, False)
    for at in when(total):
        run(at, False), run(at, True)
    assert_answers_on(llm, expected)


class Ctrl_C:
    """A profile function that interrupts at the `at`-th event where CPython looks for signals: a function begins or a
    call of C code has ended, in the package or just below it. Remembers where that was."""

    def __init__(self, at: int):
        self.at, self.places, self.entered = at, [], False

    def __call__(self, frame, event, arg):
        inside = frame.f_code.co_filename.startswith(PACKAGE)
        if event == "call":
            inside = inside or (frame.f_back and frame.f_back.f_code.co_filename.startswith(PACKAGE))
        if not inside or event not in ("call", "c_return"):
            return
        code, callee = frame.f_code, getattr(arg, "__name__", "")
        self.places.append((Path(code.co_filename).name, frame.f_lineno, code.co_name, event, callee))
        if len(self.places) == self.at:
            raise KeyboardInterrupt

    def run(self, call: Callable) -> bool:
        """Whether the call was interrupted."""
        try:
            sys.setprofile(self)
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def consume(llm) -> None:
    for _ in llm.generate_stream(PROMPTS[:2], [greedy(3, logprobs=1), seeded(3, 4, stop="~~~")]):
        pass


def complete(llm) -> None:
    llm.generate(PROMPTS[:2], [greedy(3, logprobs=1), seeded(3, 4, stop="~~~")], use_tqdm=False)


@modes
@pytest.mark.parametrize("call", [complete, consume])
def test_ctrl_c_wherever_the_interpreter_looks_for_it(small, expected, mode, call):
    def prepare():
        llm = make(small, mode, num_gpu_blocks_override=8, max_num_batched_tokens=6, max_model_len=30)
        whole = [answer(output) for output in llm.generate_stream(*beside)][-1]
        return llm, whole, answers(llm, PROMPTS[:2], greedy(3))

    beside = [50, 51, 52], greedy(8)
    (llm, whole, alone), points = prepare(), Ctrl_C(0)
    stream = llm.generate_stream(*beside)
    next(stream), points.run(lambda: call(llm)), stream.close()
    rng, first = random.Random(mode), {}
    for at in rng.sample(range(len(points.places)), len(points.places)):  # one event of each kind: same line and callee
        first.setdefault(points.places[at], at + 1)
    places = range(1, len(points.places) + 1) if FULL else sorted(first.values())[rng.randrange(8) :: 8]
    wrong, num_interrupted = [], 0
    for at in places:
        limit_steps(llm, 200)
        stream, ctrl_c = llm.generate_stream(*beside), Ctrl_C(at)
        next(stream)
        try:
            num_interrupted += ctrl_c.run(lambda: call(llm))  # noqa: B023
            assert len(llm.scheduler.requests) <= 1, "a request stayed"
            assert answer([*stream][-1]) == whole
            assert_whole(llm)
            assert answers(llm, PROMPTS[:2], greedy(3)) == alone
            assert_whole(llm)
        except Exception as error:
            wrong.append((at, ctrl_c.places[-1], f"{type(error).__name__}: {error}"[:150]))
            llm, *_ = prepare()
    assert not wrong, f"{len(wrong)} of {len(places)}:\n" + "\n".join(map(str, wrong))
    assert num_interrupted > 0.9 * len(places)  # in a destructor Python drops it


# Failing steps.


@modes
@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("late", [False, True], ids=["forward", "logits"])
def test_a_forward_pass_that_fails_is_raised_once_and_its_kv_is_found_by_nobody(small, expected, mode, kind, late):
    def prepare(fail_at: int) -> tuple[LLM, list]:  # an engine whose prefix cache is empty
        llm, step, calls = make(small, mode), {}, []
        owner, name = (llm.runner.model.lm_head, "forward") if late else (llm.runner, "_forward")
        function, forward = getattr(owner, name), llm.runner.model.forward

        def watch(input_ids, positions, caches, metadata):
            step["slots"] = metadata.slot_mapping
            return forward(input_ids, positions, caches, metadata)

        def failing(*args):
            calls.append(name)
            if len(calls) != fail_at:
                return function(*args)
            if not late:
                function(*args)
            for cache in llm.runner.kv_caches:
                cache.flatten(1, 2)[:, step["slots"]] = 7.5  # half written
            raise kind("no memory")

        llm.runner.model.forward = watch
        setattr(owner, name, failing)
        return llm, calls

    llm, calls = prepare(0)
    answers(llm, PROMPTS, PARAMS)
    for fail_at in when(len(calls)):
        llm, _ = prepare(fail_at)
        with pytest.raises(kind, match="no memory") as raised:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        (note,) = raised.value.__notes__
        names = re.split(r"\W+", note.rpartition(":")[2].strip())
        assert names and {*names} <= {"0", "1", "2"}, note  # the requests by their ids
        assert_answers_on(llm, expected)
        # The same for step()'s callers, whose requests are computed again.
        (llm, _), outputs = prepare(fail_at), {}
        for name, (prompt, params) in zip("abc", GENERATE, strict=True):
            llm.add_request(name, prompt, params)
        with pytest.raises(kind, match="no memory") as raised:
            finish(llm, outputs)
        assert {*re.split(r"\W+", raised.value.__notes__[0].rpartition(":")[2].strip())} <= {*"abc"}
        assert not llm.scheduler.running and llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
        check_scheduler(llm.scheduler)
        finish(llm, outputs)
        assert [answer(outputs[name]) for name in "abc"] == [expected[tuple(prompt)] for prompt in PROMPTS]
        assert_answers_on(llm, expected)


# Logits that are not finite.


def poison(llm, token_id: int, value: float) -> torch.Tensor:
    """Make one token's embedding spoil whoever reads it; returns the row as it was."""
    row = llm.runner.model.model.embed_tokens.weight.data[token_id]
    before = row.clone()
    row.fill_(value)
    return before


def consume_as(how: str, llm, prompts, params) -> list:
    """The last outputs of these requests, through generate, a stream or step()."""
    if how == "generate":
        return llm.generate(prompts, params, use_tqdm=False)
    if how == "stream":
        return [*{output.prompt_token_ids[0]: output for output in llm.generate_stream(prompts, params)}.values()]
    for name, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        llm.add_request(f"step-{name}", prompt, each)
    return [output for _, output in sorted(finish(llm).items())]


@modes
@pytest.mark.parametrize("how", ["generate", "stream", "step"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_not_finite_logits_end_one_request_and_touch_no_other(small, mode, how, value, sampled, capsys):
    llm = make(small, mode, max_num_batched_tokens=8)
    good = [([5, 6, 7, 8, 9], greedy(8, logprobs=1)), ([40, 41, 42] * 3, seeded(9, 3)), ([60, 61], greedy(12))]
    victim = seeded(9, 5, logprobs=1) if sampled else greedy(9, logprobs=1)
    prompt = [30, 31, 32, 33, 34, 35, 36, 37, 38]
    prompts = [good[0][0], prompt, *(each for each, _ in good[1:])]
    params = [good[0][1], victim, *(each for _, each in good[1:])]
    outputs = {tuple(output.prompt_token_ids): output for output in llm.generate(prompts, params, use_tqdm=False)}
    whole = [answer(outputs[tuple(each)]) for each in prompts]
    used = {token for i, each in enumerate(whole) if i != 1 for token in [*each[1], *prompts[i]]}
    own = [token for token in whole[1][1][2:-1] if token not in used]
    assert own
    for token in (prompt[1], own[0]):  # in its prompt, and in the middle of its output
        llm = make(small, mode, max_num_batched_tokens=8)
        before = poison(llm, token, value)
        capsys.readouterr()
        got = consume_as(how, llm, prompts, params)
        by_prompt = {tuple(output.prompt_token_ids): answer(output) for output in got}
        assert [by_prompt[tuple(each)] for each in prompts if each != prompt] == [whole[0], *whole[2:]]
        finished, token_ids, text, reason, stop_reason, logprobs = by_prompt[tuple(prompt)]
        num_good = 0 if token in prompt else whole[1][1].index(token) + 1
        assert finished and (reason, stop_reason) == ("error", None)
        assert token_ids == whole[1][1][:num_good] and logprobs == whole[1][5][:num_good]
        names = [output.request_id for output in got if output.prompt_token_ids == prompt]
        lines = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line]
        assert len(lines) == 1 and f"request {names[0]} " in lines[0]
        assert_whole(llm)
        assert all(cache.isfinite().all() for cache in llm.runner.kv_caches)
        llm.runner.model.model.embed_tokens.weight.data[token] = before
        (again,) = llm.generate(prompt, victim, use_tqdm=False)
        assert answer(again) == whole[1] and again.num_cached_tokens == 0, "a hit on what is spoilt"
        fill = [[100 + i, *range(101 + i, 117 + i)] for i in range(4)]  # takes all blocks, each with an unused end
        alone = [answers(llm, each, greedy(3))[0] for each in fill]
        assert all(each[3] == "length" for each in alone) and answers(llm, fill, greedy(3)) == alone
        assert_whole(llm)


@modes
@pytest.mark.parametrize("how", ["abort", "preempt", "interrupt"])
def test_what_a_request_spoilt_before_it_had_logits_touches_no_other(small, mode, how):
    """Its chunks write K/V that is not finite; it goes before it samples, and its blocks are handed on."""
    llm = make(small, mode, max_num_batched_tokens=8, num_gpu_blocks_override=6, scheduling_policy="priority")
    prompts = [[9, 8], [7, 6], [5, 4]]
    alone = [answers(llm, each, greedy(3))[0] for each in prompts]
    poison(llm, 33, float("nan"))
    llm.add_request("spoilt", [30, 31, 32, 33, *range(34, 50)], greedy(2), priority=9)
    llm.step(), llm.step()
    if how == "interrupt":
        with Interrupt(*SITES["schedule"](llm), 1, False), pytest.raises(KeyboardInterrupt):
            llm.step()
    if how == "preempt":
        assert answers_with_priority(llm, prompts) == alone
    llm.abort_request("spoilt")
    for prompt, each in zip(prompts * 2, alone * 2, strict=True):
        assert answers(llm, prompt, greedy(3)) == [each]
    assert answers(llm, prompts, greedy(3)) == alone
    finish(llm)  # it may have failed meanwhile, which step() says
    assert_whole(llm)


def answers_with_priority(llm, prompts) -> list[tuple]:
    outputs = llm.generate(prompts, greedy(3), use_tqdm=False, priority=[0] * len(prompts))
    return [answer(output) for output in outputs]


# Bad arguments.

DEEP = [[]]
for _ in range(3000):
    DEEP = [DEEP]
HI = {"role": "user", "content": "hi"}
ODD = (
    *(None, True, False, 0, 1, -1, 2, 7, 63, 64, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**400, 10**5000, 0.0, 0.5),
    *(1.0, -0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf"), 1j, "", " ", "auto", "hello"),
    *("fcfs", "\ud800", "a\udfffb", "\x00", "\N{GRINNING FACE}", "x" * 300, b"", b"hello", bytearray(b"a")),
    *([], [[]], [None], [1], [1, 2, 3], [1.5], ["a"], ["a", 1], [True], ["\ud800"], [[1, 2], [3]], [[[1]]], [-1]),
    *([10**30], [float("nan")], (), {}, {"a": 1}, {1: 2}, {5, 6}, set(), frozenset(), range(3), object(), int, len),
    *({"prompt": "hello"}, {"prompt": None}, {"prompt": "\ud800"}, {"prompt_token_ids": [1, 2]}, [SamplingParams()]),
    *({"prompt_token_ids": "hi"}, SamplingParams, SamplingParams(max_tokens=1), Ellipsis, NotImplemented, iter([1, 2])),
    *(torch.tensor([1, 2]), torch.tensor(1), HI, [HI], [{"role": "user"}], [{"role": 5, "content": None}], [[HI], []]),
    *(DEEP, (1, 2), memoryview(b"ab"), [{}], [{"role": "user", "content": "\ud800"}], {"style": "x"}),
    *({"style": DEEP}, {"tokenize": True}, {"return_dict": True}, {"add_generation_prompt": 5}, {"conversation": 5}),
    {"method": "eagle"},
    *({"num_speculative_tokens": n} for n in (2, None, 10**30)),
    {"num_speculative_tokens": 2, "prompt_lookup_max": []},
)
PARAM_NAMES = tuple(SamplingParams.__dataclass_fields__)
OPTION_NAMES = tuple(name for name in EngineConfig.__dataclass_fields__ if name != "model")


def choose(rng, good, chance: float = 0.7):
    """Something that is as it should be, or anything at all."""
    return rng.choice(good) if rng.random() < chance else rng.choice(ODD)


def make_call(rng, llm) -> tuple[str, Callable, tuple]:
    """One random use of the API: its name, a call, and what it was given."""
    kind = rng.choice(("options", "drafts", "params", "generate", "chat", "add_request", "generate"))
    if kind == "options":
        names = (*OPTION_NAMES, "nonsense") if rng.random() < 0.1 else OPTION_NAMES
        given = {rng.choice(names): rng.choice(ODD) for _ in range(rng.choice((1, 1, 2)))}
        model = choose(rng, ["demo"], 0.8)
        return kind, lambda: EngineConfig(model=model, **given), (model, given)
    if kind == "drafts":
        names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "nonsense")
        drafts = {rng.choice(names): choose(rng, [1, 2, 3], 0.4) for _ in range(3)}
        drafts = choose(rng, [drafts], 0.9)
        # Without a folder there is no model: what is wrong with the drafts must be said before that.
        return kind, lambda: LLM("no such/folder", speculative_config=drafts), (drafts, "no such/folder")
    given = {rng.choice(PARAM_NAMES): rng.choice(ODD) for _ in range(rng.choice((1, 2)))}
    if kind == "params":
        return kind, lambda: SamplingParams(**given), (given,)

    def params():
        try:
            return SamplingParams(**{**given, "max_tokens": 2})
        except Exception:  # looked at where SamplingParams alone is called
            return SamplingParams(max_tokens=1)

    one = params()
    if kind == "generate":
        prompts = choose(rng, ["hello", [5, 6], [[5, 6], "world"], [{"prompt": "hi"}]], 0.4)
        params = choose(rng, [one, [one], [one, one], None])
        priority = choose(rng, [None, [0], [0, 1]])
        call = rng.choice((llm.generate, lambda *args: [*llm.generate_stream(*args)]))
        args = (prompts, params, False, priority) if call == llm.generate else (prompts, params, priority)
        return kind, lambda: call(*args), args
    if kind == "chat":
        args = (choose(rng, [[HI]], 0.6), choose(rng, [one, None]), False)
        args += (choose(rng, [True, False]), choose(rng, [None, {}]), choose(rng, [None, [0]]))
        return kind, lambda: llm.chat(*args), args
    name = choose(rng, ["a", "b"])
    args = (name, choose(rng, ["hello", [5, 6]], 0.5), choose(rng, [one, None]), choose(rng, [None, 1.0]))
    args += (choose(rng, [0, 1]),)

    def add_request():
        llm.add_request("first", [5], SamplingParams(max_tokens=1))
        try:
            llm.add_request(*args)
        finally:
            check_scheduler(llm.scheduler)
            finish(llm)

    return kind, add_request, args


def names_something(message: str, given) -> bool:
    """Whether a message shows one of the values that were given, or names an argument; Python's own messages that name
    an argument do, those that only name a type do not."""
    values, words = [given], []
    for value in values:
        if isinstance(value, dict):
            values += [*value.values(), *(key for key in value if isinstance(key, str))]
        elif isinstance(value, list | tuple) and value is not DEEP:
            values += value
    for value in values:
        try:
            words.append(repr(value)[:20])
        except (ValueError, RecursionError):
            pass
    words = [word for word in words if len(word) > 2 or not word.isalnum()] + [word for word in words if word.isalnum()]
    arguments = "prompt", "params", "priority", "request_id", "arrival_time", "messages", "conversation", "chat"
    arguments += "model", "num_speculative_tokens", *PARAM_NAMES, *OPTION_NAMES
    return any(word in message for word in words) or any(word in message for word in arguments)


def test_twenty_thousand_random_calls_give_a_result_or_say_what_is_wrong(small):
    """No AttributeError, KeyError, RecursionError and the like, no message that says nothing, nothing left behind."""
    engines = [make(small, scheduling_policy=policy) for policy in ("fcfs", "priority")]
    rng, wrong, counts = random.Random(4), {}, Counter()
    for i in range(20_000):
        which = rng.randrange(2)
        llm = engines[which]
        if i % 50 == 0:
            limit_steps(llm, 10_000)
        kind, call, given = make_call(rng, llm)
        try:
            call()
            counts[kind, "result"] += 1
            problem = None
        except Exception as error:
            counts[kind, type(error).__name__] += 1
            ok = type(error) in (ValueError, TypeError) and names_something(str(error), given)
            problem = None if ok else f"{type(error).__name__}: {error!s:.120}"
        left = [*map(type, (*llm.scheduler.requests, *llm._states, *llm.scheduler.waiting, *llm.scheduler.running))]
        if left or llm.block_manager.num_free_blocks < llm.block_manager.num_blocks:
            problem = f"left behind: {left!r:.100}" + (problem or "")
            engines[which] = make(small, scheduling_policy=("fcfs", "priority")[which])
        if problem:
            try:
                shown = f"{given!r:.300}"
            except Exception as error:
                shown = f"what has no repr ({type(error).__name__})"
            wrong.setdefault((kind, problem.partition(":")[0]), []).append(f"{problem}\n    {shown}")
    for llm in engines:
        assert_whole(llm)
    report = [f"{len(cases)} x {kind}: {min(cases, key=len)}" for (kind, _), cases in wrong.items()]
    assert not wrong, f"{len(wrong)} kinds:\n" + "\n".join(report)
    kinds = "options", "params", "generate", "chat", "add_request"
    assert all(counts[kind, "result"] > 50 for kind in kinds), counts


# Overload.


def test_two_thousand_requests_on_a_cache_for_ten_finish_in_their_order(small):
    rng = random.Random(0)
    llm = make(small, num_gpu_blocks_override=40, max_num_seqs=64, max_num_batched_tokens=64)
    prompts = [[rng.randrange(2, 288) for _ in range(8)] for _ in range(2000)]
    alone = [answers(llm, prompt, greedy(8))[0] for prompt in prompts[::100]]
    first, ended, update = {}, [], llm.scheduler.update_from_output

    def watch(output, sampled):
        first.update((share.request_id, None) for share in output.scheduled if share.request_id not in first)
        done = update(output, sampled)
        ended.extend(request.request_id for request in done)
        return done

    llm.scheduler.update_from_output = watch
    outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
    names = [output.request_id for output in outputs]
    assert [answer(output) for output in outputs[::100]] == alone
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    # First come, first served: whoever came earlier is admitted earlier and, of equal lengths, done no later.
    assert [*first] == names == ended
    # A preemption happens where a request grows by a block and none is free. Only the last to arrive is preempted, it
    # comes back with all its blocks at once, and a victim frees a block at least: so at most one for each growth.
    num_growths = sum(cdiv(8 + 8 - 1, 4) - cdiv(8, 4) for _ in prompts)
    assert 0 < sum(output.metrics.num_preemptions for output in outputs) <= num_growths
    assert max(output.metrics.num_preemptions for output in outputs) <= 2 * 10  # growths of those that ran before it
    assert llm.get_metrics()["recomputed_tokens"] <= 15 * num_growths
    del llm.scheduler.update_from_output
    assert_whole(llm)


# The same tokens every time.

SCRIPT = """
import json, sys
from nanoserve import LLM, SamplingParams
folder, order = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, block_size=4, num_gpu_blocks_override=int(sys.argv[3]), max_model_len=64, seed=11)
params = [SamplingParams(temperature=1.2, top_p=0.95, seed=i, max_tokens=12, ignore_eos=True) for i in range(8)]
prompts = [[20 + i, *range(30, 30 + i)] for i in range(8)]
for i, output in zip(order, llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)):
    print(json.dumps([i, output.outputs[0].token_ids, output.outputs[0].text]))
unseeded = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
print(json.dumps([-1, [output.outputs[0].token_ids for output in unseeded]]))
"""


def test_the_same_seeds_give_the_same_tokens_in_two_processes_and_in_any_order(small):
    runs = []
    straight, mixed = [*range(8)], [5, 2, 7, 0, 3, 6, 1, 4]
    for order, num_blocks, salt in ((straight, 100, "0"), (straight, 100, "1"), (mixed, 16, "2")):
        args = [sys.executable, "-c", SCRIPT, small, str(order), str(num_blocks)]
        env = os.environ | {"PYTHONHASHSEED": salt}
        runs.append(subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env))
    lines = [run.communicate()[0].splitlines() for run in runs]
    assert all(run.returncode == 0 for run in runs) and len(lines[0]) == 9
    assert lines[0] == lines[1], "two processes"  # the unseeded ones too: same engine seed, same calls
    assert sorted(lines[0][:8]) == sorted(lines[2][:8]), "another order, with preemptions"


# Threads.


@modes
@pytest.mark.parametrize("stop", [None, "~~~"])
def test_threads_that_share_an_engine_take_turns(small, mode, stop):
    llm, errors = make(small, mode, num_gpu_blocks_override=24, max_num_seqs=4), []
    jobs = [([20 + i, *range(40, 43 + i)], seeded(6 + i, i, stop=stop, logprobs=1)) for i in range(6)]
    alone = [answers(llm, *job)[0] for job in jobs]
    barrier, interval = threading.Barrier(6), sys.getswitchinterval()

    def work(i: int) -> None:
        try:
            barrier.wait()
            for round_ in range(12):
                mine = [(i + k) % 6 for k in range(3)]
                prompts, params = [jobs[k][0] for k in mine], [jobs[k][1] for k in mine]
                if (i + round_) % 2:
                    assert answers(llm, prompts, params) == [alone[k] for k in mine]
                    continue
                last, done = {}, []
                for output in llm.generate_stream(prompts, params):
                    before = last.get(output.request_id)
                    assert before is None or not before.finished, "an output after the finished one"
                    if before:
                        old, new = before.outputs[0], output.outputs[0]
                        assert new.text.startswith(old.text) and new.token_ids[: len(old.token_ids)] == old.token_ids
                    last[output.request_id] = output
                    done += [output] if output.finished else []
                assert [answer(output) for output in last.values()] == [alone[k] for k in mine]
                assert len(done) == 3
        except BaseException as error:
            errors.append(f"thread {i}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, "\n".join(errors)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert_whole(llm)


def test_an_output_is_whole_whatever_another_thread_does_while_it_is_made(small, monkeypatch):
    llm, others, shown = make(small), [], Detokenizer.shown
    (alone,) = answers(llm, A, greedy(6))

    def slow(*args):
        if not others:
            others.append(threading.Thread(target=lambda: [llm.step() for _ in range(10)], daemon=True))
            others[0].start()
            others[0].join(0.5)  # it waits for its turn, or ends the request here
        return shown(*args)

    monkeypatch.setattr(Detokenizer, "shown", slow)
    outputs = [answer(output) for output in llm.generate_stream(A, greedy(6))]
    others[0].join()
    assert [output for output in outputs if output[0]] == [alone], "finished is seen once, with all of the text"
    llm.step()
    assert_whole(llm)


def test_ctrl_c_while_the_text_of_a_finished_request_is_made(small):
    (expected,) = make(small).generate([A], greedy(5), use_tqdm=False)
    llm = make(small)
    llm.add_request("r", A, greedy(5))
    while llm.scheduler.requests:
        llm._step()  # its outputs are not looked at
    (state,) = llm._news
    spell, calls = state.detokenizer._spell, []

    def interrupted(token_id):
        calls.append(token_id)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return spell(token_id)

    state.detokenizer._spell = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    (output,) = llm.step()
    assert output.finished and output.outputs[0] == expected.outputs[0]
    assert_whole(llm)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ctrl_c_while_a_token_is_looked_at_leaves_nobody_running(small, mode):
    class Ids(frozenset):
        """The ids that end an output; whoever asks for the fourth time is interrupted."""

        num_asked = 0

        def __contains__(self, token_id):
            Ids.num_asked += 1
            if Ids.num_asked == 4:
                raise KeyboardInterrupt
            return False

    llm, params = make(small, mode), SamplingParams(temperature=0, max_tokens=4)
    (expected,) = llm.generate([A], greedy(4), use_tqdm=False)
    llm.scheduler.eos_token_ids = Ids()
    llm.add_request("r", A, params)
    outputs, interrupts = [], 0
    for _ in range(20):
        try:
            outputs += llm.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1 and outputs[-1].finished and not llm.has_unfinished_requests()
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    assert_whole(llm)
