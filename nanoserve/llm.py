"""The loop: tokenize, step, detokenize (chapter 2.2, section 4). This module decides what a caller's prompts become and
when text comes back. It does not decide who is computed (scheduler.py) or how (model_runner.py)."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from threading import RLock
from typing import Any

import torch
from tqdm import tqdm

from nanoserve.async_scheduler import AsyncScheduler
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.detokenizer import Detokenizer
from nanoserve.loader import find_model, load_config, load_tokenizer
from nanoserve.model_runner import ModelRunner
from nanoserve.ngram import NgramProposer
from nanoserve.request import (CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput, RequestStatus,
                               SamplingParams, blame, check_options, require, show)
from nanoserve.scheduler import ScheduledRequest, Scheduler, SchedulerOutput

Prompt = str | Sequence[int] | dict[str, Any]  # a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Params = SamplingParams | Sequence[SamplingParams] | None
_COUNTERS = ("num_steps", "prompt_tokens", "generation_tokens", "num_preemptions", "recomputed_tokens",
             "prefix_cache_queries", "prefix_cache_hits", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


class _RequestState:
    """A request as its caller sees it: text, logprobs and times, beside the scheduler's Request."""
    def __init__(self, request: Request, prompt: str | None, tokenizer: Any, news: "dict[_RequestState, None]"):
        self.request, self.prompt, self.prompt_token_ids = request, prompt, request.token_ids[:]
        stop, skip = tuple(request.sampling_params.stop or ()), request.sampling_params.skip_special_tokens
        self.make_detokenizer = partial(Detokenizer, tokenizer, self.prompt_token_ids, stop, skip)
        self.detokenizer = self.make_detokenizer()
        self.logprobs: list[dict[int, Logprob]] = []
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_seen, self.num_reached = request.num_tokens, 0  # tokens counted already; computed at least once
        self.news = news  # where its caller looks for states that have got further

    @property
    def finished(self) -> bool:
        return self.request.status.is_finished

    def read(self) -> str | None:
        """Turn the tokens that came into text. Returns the stop string that ends it, if one does."""
        # An id that ended the output is no part of the text.
        end = self.request.num_tokens - (self.request.status is RequestStatus.FINISHED_STOPPED)
        return self.detokenizer.append(self.request.token_ids[self.detokenizer.num_read : end], self.finished)

    def output(self) -> RequestOutput:
        self.read()
        request, text = self.request, self.detokenizer.shown(self.finished)
        token_ids, reasons = request.output_token_ids, (request.status.finish_reason, request.stop_reason)
        logprobs = None if request.sampling_params.logprobs is None else self.logprobs[: len(token_ids)]
        completions = [CompletionOutput(text, token_ids, *reasons, logprobs)]
        metrics = replace(self.metrics, num_preemptions=request.num_preemptions)
        return RequestOutput(request.request_id, self.prompt, self.prompt_token_ids, completions, self.finished,
                             request.num_cached_tokens, metrics)


class LLM:
    """The offline engine, in the shape of vLLM's LLM and LLMEngine. Threads may share one: they take turns, by step.
    `model` is a local folder, a hub id, or "demo"; the options are EngineConfig's. Raises ValueError for an unknown or
    impossible option and for a model that is broken or not supported."""
    def __init__(self, model: str, **options: Any):
        known = EngineConfig.__dataclass_fields__.keys() - {"model", "hf_config", "vocab_size"}
        require(options.keys() <= known, "options", f"among {', '.join(sorted(known))}", sorted(options.keys() - known))
        config = EngineConfig(model=model, **options)
        with blame("speculative_config"):
            self.drafter = None if config.speculative_config is None else NgramProposer(**config.speculative_config)
        folder = find_model(model)
        hf_config = load_config(folder)
        self.tokenizer, eos_token_ids = load_tokenizer(folder, hf_config)
        # As in vLLM: the tokenizer's EOS is no stop_reason, the generation config's further ones are stop_token_ids.
        self._more_eos_ids = tuple(eos_token_ids - {self.tokenizer.eos_token_id})
        self.config = config = config.for_model(hf_config, min(hf_config.vocab_size, len(self.tokenizer)))
        self.runner = runner = ModelRunner(config, folder)
        self.block_manager = BlockManager(runner.num_blocks, runner.block_size, config.enable_prefix_caching)
        # A limit nobody asked for gives way to what the cache holds.
        num_slots = runner.num_blocks * runner.block_size
        max_model_len = options.get("max_model_len") or min(runner.max_model_len, num_slots)
        limits = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
        self.scheduler = (AsyncScheduler if runner.async_scheduling else Scheduler)(
            self.block_manager, **{name: getattr(config, name) for name in limits}, max_model_len=max_model_len,
            policy=config.scheduling_policy, eos_token_ids=eos_token_ids & {self.tokenizer.eos_token_id})
        self.last_output: SchedulerOutput | None = None  # the step scheduled last, for whoever watches
        self._in_flight: list[tuple] = []  # steps launched: output, states, time, and what waits for the result
        self._states: dict[str, _RequestState] = {}
        self._news: dict[_RequestState, None] = {}  # what step() has not returned yet
        self._ids, self._counters = count(), Counter(dict.fromkeys(_COUNTERS, 0))
        self._lock = RLock()  # held by whoever changes requests or steps
        print(f"nanoserve: {runner.device}, {torch.get_num_threads()} threads, {runner.dtype}, attention "
              f"{runner.backend.name}, async scheduling {runner.async_scheduling}, K/V cache {runner.num_blocks} "
              f"blocks x {runner.block_size} = {num_slots} tokens, max_model_len {max_model_len}", file=sys.stderr)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True,
                 priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Complete one prompt or a list, with one SamplingParams for all or a list; outputs in the prompts' order.
        ValueError, with nothing queued, for an impossible one, a list of wrong length, or a `priority` under "fcfs"."""
        states = self._make_states(prompts, sampling_params, priority)
        begin, before = time.perf_counter(), self._counters["generation_tokens"]
        with tqdm(total=len(states), desc="requests", disable=not use_tqdm) as bar:
            for state in self._run(states, lambda state: state):
                if state.finished:
                    rate = (self._counters["generation_tokens"] - before) / (time.perf_counter() - begin)
                    running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
                    bar.set_postfix_str(f"{rate:.1f} tokens/s, {running=}, {waiting=}", refresh=False)
                    bar.update()
        return [state.output() for state in states]

    def generate_stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None,
                        priority: Sequence[int] | None = None) -> Iterator[RequestOutput]:
        """As `generate`, but each RequestOutput as it grows; closing the iterator aborts what is unfinished."""
        return self._run(self._make_states(prompts, sampling_params, priority), _RequestState.output)

    def chat(self, messages: Sequence, sampling_params: Params = None, use_tqdm: bool = True,
             add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None,
             priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role": ..., "content": ...} messages, or a list of conversations. Raises
        ValueError as `generate` does, and for messages that the tokenizer's chat template refuses."""
        prompts = self.preprocess_chat(messages, add_generation_prompt, chat_template_kwargs)
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def preprocess_chat(self, messages: Sequence, add_generation_prompt: bool = True,
                        chat_template_kwargs: dict | None = None) -> list[Prompt]:
        """The prompts `chat` would complete, one a conversation."""
        require(isinstance(messages, list | tuple), "messages", "a list of messages or of conversations", messages)
        prompts: list[Prompt] = []
        for conversation in [messages] if messages and isinstance(messages[0], dict) else messages:
            with blame(f"the chat template cannot render {show(conversation)} with {show(chat_template_kwargs)}"):
                more = {} if chat_template_kwargs is None else chat_template_kwargs
                options = {"add_generation_prompt": add_generation_prompt, **more, "tokenize": False}
                text = self.tokenizer.apply_chat_template(conversation, **options)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote its own
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None,
                    arrival_time: float | None = None, priority: int = 0) -> None:
        """Queue one request, at any time. Raises ValueError; then nothing is queued."""
        params = SamplingParams() if params is None else params
        self._add(self._make_state(request_id, prompt, params, priority, arrival_time))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests and give their blocks back; ids that are not live are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._turn():
            for request_id in names:
                self.scheduler.abort_request(request_id)
                if state := self._states.pop(request_id, None):
                    state.news[state] = None
                    self._news.pop(state, None)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has something to do, or to return."""
        return self.scheduler.has_unfinished_requests or bool(self._news)

    def step(self) -> list[RequestOutput]:
        """One iteration of the loop; outputs of add_request's requests that got a token. If it raises, they wait."""
        self._step()
        with self._turn():
            outputs = [state.output() for state in self._news]
            self._news.clear()
            return outputs

    def get_metrics(self) -> dict[str, float]:
        """Counters since construction, in tokens, steps or requests (of prefix cache queries and hits: tokens, at first
        admission; num_drafts: times that drafts were verified), and the share of K/V blocks in use now."""
        counters, accepted = self._counters, self._counters["num_accepted_tokens"]
        return {**counters, "kv_cache_usage": 1 - self.block_manager.num_free_blocks / self.block_manager.num_blocks,
                "num_requests_running": len(self.scheduler.running),
                "num_requests_waiting": len(self.scheduler.waiting),
                "draft_acceptance_rate": accepted / max(1, counters["num_draft_tokens"]),
                "mean_acceptance_length": 1 + accepted / max(1, counters["num_drafts"])}  # tokens per verified draft

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time, and whatever fails meanwhile, or is interrupted, leaves an engine that can go on."""
        with self._lock:
            try:
                yield
            except BaseException as error:
                running = ", ".join(request.request_id for request in self.scheduler.running)
                add_note = getattr(error, "add_note", print)  # Python 3.10 has no notes
                add_note(f"nanoserve: interrupted or failed; these requests wait to be computed again: {running}")
                self._in_flight.clear()
                self.runner.reset()
                self.scheduler.requeue_running()
                for state in [*self._states.values(), *self._news]:
                    state.detokenizer = state.make_detokenizer()  # reads again, from the first token
                    self._read(state, time.time())
                raise

    def _step(self) -> None:
        """Launch a step and finish it, or with async scheduling the one before it."""
        with self._turn():
            self.last_output = output = self.scheduler.schedule()
            if self.drafter:
                self.drafter.forget(output.finished_req_ids)
            states = [self._states[share.request_id] for share in output.scheduled]
            self._in_flight.append((output, states, time.time(), self.runner.launch(output)))
            # One may stay in flight, but none once nobody is left.
            num_left = int(isinstance(self.scheduler, AsyncScheduler) and bool(output.scheduled))
            while len(self._in_flight) > num_left * self.scheduler.has_unfinished_requests:
                self._finish_step(*self._in_flight.pop(0))

    def _finish_step(self, output: SchedulerOutput, states: list[_RequestState], begin: float, wait: Callable) -> None:
        result, end = wait(), time.time()
        self._counters.update(num_steps=1, num_preemptions=len(output.preempted_req_ids))
        for i, (state, share) in enumerate(zip(states, output.scheduled, strict=True)):
            self._count(state, share, result.sampled_token_ids[i], begin)
            if result.logprobs[i]:
                state.logprobs[len(state.request.output_token_ids) :] = map(self._logprobs, result.logprobs[i])
        self.scheduler.update_from_output(output, result.sampled_token_ids)
        for state in states:
            self._read(state, end)
        if self.drafter:
            sampled = zip(states, result.sampled_token_ids, strict=True)
            for request in (state.request for state, token_ids in sampled if token_ids and not state.finished):
                drafts = self.drafter.propose(request.request_id, request.token_ids)
                # What would come after the request's last token need not be computed.
                drafts = drafts[: request.max_num_tokens - request.num_tokens - 1]
                self.scheduler.update_draft_token_ids({request.request_id: drafts})

    def _count(self, state: _RequestState, share: ScheduledRequest, token_ids: list[int], begin: float) -> None:
        counters, request, start = self._counters, state.request, share.num_computed_tokens
        if state.metrics.first_scheduled_time is None:
            state.metrics.first_scheduled_time, length = begin, request.num_prompt_tokens
            queries, hits = length if self.config.enable_prefix_caching else 0, request.num_cached_tokens
            counters.update(prompt_tokens=length, prefix_cache_queries=queries, prefix_cache_hits=hits)
        end = start + len(share.token_ids)
        if drafts := share.num_spec_tokens:
            end += len(token_ids) - 1 - drafts  # without the rejected ones
            counters.update(num_drafts=1, num_draft_tokens=drafts, num_accepted_tokens=len(token_ids) - 1)
        if start < state.num_reached:
            counters["recomputed_tokens"] += min(end, state.num_reached) - start
        state.num_reached = max(state.num_reached, end)

    def _read(self, state: _RequestState, now: float) -> None:
        """Count a request's new tokens, if it has any, and end it if their text has come to a stop string. Text is made
        of them when somebody looks at it: here only if there are stop strings to look for."""
        request, metrics = state.request, state.metrics
        has_more = state.finished or request.num_tokens > state.num_seen  # not if its prompt goes on, or preempted
        if not has_more or self._states.get(request.request_id) is not state:  # nor if it ended before this step did
            return
        if request.sampling_params.stop and (stop := state.read()) is not None:
            self.scheduler.finish_request(request, RequestStatus.FINISHED_STOPPED, state.detokenizer.num_read, stop)
        self._counters["generation_tokens"] += request.num_tokens - state.num_seen
        state.num_seen = request.num_tokens
        state.news[state] = None
        metrics.first_token_time = metrics.first_token_time or now
        if state.finished:
            metrics.finished_time = now
            del self._states[request.request_id]
            if request.status is RequestStatus.FINISHED_ERROR:
                print(f"nanoserve: request {request.request_id} failed: its logits are not finite", file=sys.stderr)

    def _logprobs(self, token: tuple) -> dict[int, Logprob]:
        ids, values, rank = token
        entries = zip(ids, values, [rank, *range(1, len(ids))], strict=True)
        return {i: Logprob(value, rank, self.tokenizer.decode([i])) for i, value, rank in entries}

    def _run(self, states: list[_RequestState], look: Callable[[_RequestState], Any]) -> Iterator[Any]:
        """Step until these requests are done, giving out `look` of each that has got further; others may run too."""
        left, news = set(states), dict[_RequestState, None]()
        try:
            for state in states:
                state.news = news
                self._add(state)
            while left:
                if not news:  # there may be some from a step that another caller ran
                    self._step()
                for state in [*news]:
                    with self._lock:
                        del news[state]
                        left -= {state} if state.finished else set()
                        seen = look(state)
                    yield seen
        finally:
            names = [name for state in left if self._states.get(name := state.request.request_id) is state]
            try:
                self.abort_request(names)
            except BaseException:  # a second Ctrl-C
                self.abort_request(names)
                raise

    def _add(self, state: _RequestState) -> None:
        with self._lock:
            self.scheduler.check_request(state.request)  # again: others may have come since it was made
            with self._turn():
                self._states[state.request.request_id] = state
                self.scheduler.add_request(state.request)

    def _make_states(self, prompts: Any, params: Any, priority: Any) -> list[_RequestState]:
        """One state a prompt; all are checked before the first is queued."""
        if not isinstance(prompts, list | tuple) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        require(priority is None or self.scheduler.policy == "priority", "priority", "None under fcfs", priority)
        params = _one_each("sampling_params", SamplingParams() if params is None else params, len(prompts))
        priority = _one_each("priority", 0 if priority is None else priority, len(prompts))
        ids = (str(i) for i in self._ids if str(i) not in self.scheduler.requests)
        return [self._make_state(next(ids), *each) for each in zip(prompts, params, priority, strict=True)]

    def _make_state(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int,
                    arrival_time: float | None = None) -> _RequestState:
        text, token_ids = self._tokenize(prompt)
        arrival_time = time.time() if arrival_time is None else arrival_time
        request = Request(request_id, token_ids, params, priority, arrival_time)
        check_options(request)
        if self._more_eos_ids and not params.ignore_eos:
            stop_token_ids = (*(params.stop_token_ids or ()), *self._more_eos_ids)
            request.sampling_params = replace(params, stop_token_ids=stop_token_ids)
        self.scheduler.check_request(request)
        return _RequestState(request, text, self.tokenizer, self._news)

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Text and ids of a prompt. Raises ValueError for what is no prompt, and for ids the model does not have."""
        text: Any = None
        ids: Any = prompt
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(ids, str):
            with blame(f"the tokenizer cannot read {show(ids)}"):
                text, ids = ids, self.tokenizer(ids)["input_ids"]
        require(isinstance(ids, list | tuple), "a prompt", "a str, a list of token ids or a dict with either", prompt)
        limit = self.config.hf_config.vocab_size
        wrong = [token_id for token_id in ids if type(token_id) is not int or not 0 <= token_id < limit]
        require(not wrong, "the prompt's token ids", f"in [0, {limit})", wrong)
        return text, list(ids)


def _one_each(name: str, given: Any, num_prompts: int) -> Sequence[Any]:
    """What was given for every prompt, or its items one for each. Raises ValueError if their number is wrong."""
    given = given if isinstance(given, list | tuple) else [given] * num_prompts
    require(len(given) == num_prompts, f"the number of {name}", f"{num_prompts}, one a prompt", len(given))
    return given
