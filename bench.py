"""The claims of chapter 2.2, measured on the real engine.

python bench.py                             # the throughput of a batch of requests: the default subcommand
python bench.py static --plot static.png    # static against continuous batching (sections 2 and 3)
python bench.py --help                      # all subcommands; `python bench.py load --help` shows the options of one

On a CPU the defaults are smaller: every subcommand ends within two minutes with the demo model, if the cores are its
own (if not, set OMP_WAIT_POLICY=passive). A request generates exactly as many tokens as it asks for. Latencies count
from the moment a request was to arrive, whether or not the engine was free to take it then.
"""

import csv
import json
import platform
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, util
from itertools import accumulate, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoserve import LLM, RequestOutput, SamplingParams, __version__, model_runner
from nanoserve.attention import group_rows
from nanoserve.block_manager import BlockManager, cdiv
from nanoserve.loader import find_model, load_config
from nanoserve.model import CausalLM, Linear
from nanoserve.request import Request
from nanoserve.sampler import sample
from nanoserve.scheduler import Scheduler, StaticBatchScheduler
from timeline import Cell, Timeline

_COMMON = dict(rms_norm_eps=1e-6, tie_word_embeddings=True, dtype="bfloat16", bos_token_id=0, eos_token_id=1)
_QWEN3 = _COMMON | dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=28, num_attention_heads=16, head_dim=128,
    num_key_value_heads=8, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6,
)  # fmt: skip
SHAPES = {  # models by their published sizes, for random weights
    "qwen3-0.6b": _QWEN3 | dict(hidden_size=1024, intermediate_size=3072),
    "qwen3-1.7b": _QWEN3 | dict(hidden_size=2048, intermediate_size=6144),
    "llama-3.2-1b": _COMMON | dict(
        model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, hidden_size=2048, intermediate_size=8192, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=dict(
            rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192), rms_norm_eps=1e-5,
    ),
    "stub": _COMMON | dict(  # for `host`, which does not run it
        model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1, num_attention_heads=1, head_dim=8,
        num_key_value_heads=1, hidden_size=8, intermediate_size=8, vocab_size=64, max_position_embeddings=40960,
    ),
}  # fmt: skip
BANDWIDTHS = {  # bytes per second, by CUDA's name for the device
    "NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.04e12, "NVIDIA L40S": 0.864e12,
    "NVIDIA GeForce RTX 4090": 1.008e12, "NVIDIA GeForce RTX 3090": 0.936e12,
}  # fmt: skip
CHAPTER_BATCH = (500, 20, 30, 40, 50, 60, 70, 80)  # section 2: the longest 500, the seven others 50 on average
SCHEDULERS = {"static": StaticBatchScheduler, "continuous": Scheduler}
MODULES = {"nanoserve": "nanoserve", "transformers": "transformers", "vllm": "vllm", "nano-vllm": "nanovllm"}


# What is asked of the engine, and what came of it


@dataclass(frozen=True)
class Job:
    """A request to come."""

    name: str
    prompt: list[int]
    num_output: int
    at: float = 0.0  # arrival, in seconds from the start
    from_step: int = 0  # and not before this many steps
    priority: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.num_output, ignore_eos=True)


def make_jobs(args: Namespace, lengths: Iterable[Iterable[int]], rng: random.Random) -> list[Job]:
    """A job of random token ids for each pair of prompt and output length."""
    return [Job(str(i), [rng.randrange(args.vocab_size) for _ in range(n)], m) for i, (n, m) in enumerate(lengths)]


def uniform(args: Namespace, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Lengths between the bounds of --prompt-len and --output-len."""
    return ((rng.randint(*args.prompt_len), rng.randint(*args.output_len)) for _ in range(args.num_seqs))


@dataclass(frozen=True)
class Run:
    """What came of some jobs; times are time.time()'s, as in RequestMetrics."""

    jobs: list[Job]
    outputs: dict[str, RequestOutput]  # by the job's name
    begin: float
    end: float
    counters: dict[str, float]  # what LLM.get_metrics() counted meanwhile
    token_times: dict[str, list[float]]  # by the job's name; empty where nobody looked

    def since_arrival(self, event: str) -> list[float]:
        """Seconds from each job's arrival to an event of RequestMetrics."""
        return [getattr(self.outputs[job.name].metrics, event) - self.begin - job.at for job in self.jobs]

    def tpot(self) -> list[float]:
        """Seconds per output token after the first, of each job that has more than one."""
        some = [(self.outputs[job.name].metrics, job.num_output - 1) for job in self.jobs if job.num_output > 1]
        return [(metrics.finished_time - metrics.first_token_time) / n for metrics, n in some]

    def rates(self) -> dict[str, float]:
        seconds, num_output = self.end - self.begin, sum(job.num_output for job in self.jobs)
        num_total = num_output + sum(len(job.prompt) for job in self.jobs)
        row = {"time (s)": seconds, "output (tokens/s)": num_output / seconds}
        return row | {
            "prompt + output (tokens/s)": num_total / seconds,
            "finished (requests/s)": len(self.jobs) / seconds,
        }

    def latencies(self) -> dict[str, float]:
        row = {"mean queueing (ms)": 1e3 * mean(self.since_arrival("first_scheduled_time"))}
        for name, seconds in ("TTFT", self.since_arrival("first_token_time")), ("TPOT", self.tpot()):
            row |= {f"{name} P{p} (ms)": percentile(seconds, p) for p in (50, 95, 99)}
        return row


def percentile(seconds: list[float], percent: int) -> float:
    """In milliseconds."""
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else float("nan")


def make_llm(args: Namespace, jobs: list[Job], **options: Any) -> LLM:
    """An engine just large enough for these jobs, warmed up."""
    longest = max(len(job.prompt) + job.num_output for job in jobs)
    llm = LLM(str(args.folder), max_model_len=longest, seed=args.seed, **args.engine_options, **options)
    llm.generate([[0], [1]], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.step()  # schedules nobody, and tells the runner who has finished
    return llm


def use_scheduler(llm: LLM, scheduler_cls: type[Scheduler] = Scheduler, **options: Any) -> None:
    """Another scheduler and an empty cache for an idle engine, so that a comparison loads its model only once."""
    llm.step()  # the runner learns who has finished
    num_blocks = options.pop("num_blocks", llm.runner.num_blocks)
    if num_blocks > llm.runner.num_blocks:
        raise ValueError(
            f"the cache has {llm.runner.num_blocks} blocks, not {num_blocks}: ask for fewer or shorter requests"
        )
    llm.block_manager = BlockManager(num_blocks, llm.runner.block_size, options.pop("enable_prefix_caching", True))
    same = {name: getattr(llm.config, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    same |= {name: getattr(llm.scheduler, name) for name in ("max_model_len", "eos_token_ids")}
    llm.scheduler = scheduler_cls(llm.block_manager, **same | options)


def drive(llm: LLM, jobs: list[Job], desc: str, timeline: Timeline | None = None) -> Run:
    """Step through the jobs; each is added when its time has come, whether or not the engine keeps up."""
    pending = deque(sorted(jobs, key=lambda job: (job.from_step, job.at)))
    outputs: dict[str, RequestOutput] = {}
    token_times: dict[str, list[float]] = {job.name: [] for job in jobs}
    before, begin, num_steps = llm.get_metrics(), time.time(), 0
    with tqdm(total=len(jobs), desc=desc, leave=False) as bar:
        while pending or llm.has_unfinished_requests():
            while pending and begin + pending[0].at <= time.time() and pending[0].from_step <= num_steps:
                job = pending.popleft()
                llm.add_request(job.name, job.prompt, job.params, priority=job.priority)
                if timeline:
                    timeline.arrive(job.name)
            if not llm.has_unfinished_requests():
                time.sleep(max(0.0, begin + pending[0].at - time.time()))
                num_steps = max(num_steps, pending[0].from_step)
                continue
            for output in llm.step():
                token_times[output.request_id].append(time.time())
                if output.finished:
                    outputs[output.request_id] = output
                    bar.update()
            num_steps += 1
            if timeline:
                timeline.record(llm.last_output)
    return finish(llm, jobs, outputs, begin, before, token_times)


def finish(llm: LLM, jobs: list[Job], outputs: dict, begin: float, before: dict, token_times: dict) -> Run:
    end, after = time.time(), llm.get_metrics()
    return Run(jobs, outputs, begin, end, {name: after[name] - before[name] for name in after}, token_times)


def simulate(scheduler: Scheduler, jobs: list[Job], timeline: Timeline) -> None:
    """The real scheduler without a model: whoever has reached the end of its known tokens is given another one."""
    for job in jobs:
        scheduler.add_request(Request(job.name, job.prompt, job.params))
        timeline.arrive(job.name)
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        timeline.record(output)
        scheduler.update_from_output(output, [[0] if share.is_last_chunk else [] for share in output.scheduled])


# How it is shown


def show(rows: list[dict]) -> list[dict]:
    """Print rows that have the same keys: as a table, a single one as a list. Returns them."""
    cells = [[_format(value) for value in row.values()] for row in rows]
    if len(rows) == 1:
        print("\n".join(f"{name:48}{cell}" for name, cell in zip(rows[0], cells[0], strict=True)))
        return rows
    words = [[*name.split(), *column] for name, *column in zip(rows[0], *cells, strict=True)]
    heads = [textwrap.wrap(name, max(map(len, each))) for name, each in zip(rows[0], words, strict=True)]
    heads = [[""] * (max(map(len, heads)) - len(head)) + head for head in heads]
    for line in (*zip(*heads, strict=True), ["-" * max(map(len, each)) for each in words], *cells):
        print("  ".join(cell.rjust(max(map(len, each))) for cell, each in zip(line, words, strict=True)))
    return rows


def _format(value: Any) -> str:
    return f"{value:,.{0 if abs(value) >= 100 else 2}f}" if isinstance(value, float) else str(value)


def make_figure(num_rows: int, num_columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=90)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options).ravel()


def plot_rows(path: str, rows: list[dict], x: str, panels: list[list[str]], by: str | None = None) -> None:
    """Lines over the column `x`: a panel for each list of columns of one kind, a line for each value of `by`."""
    columns = len(panels) if len(panels) < 4 else 2
    figure, axes = make_figure(-(-len(panels) // columns), columns, 4.7 * columns, 3.6 * -(-len(panels) // columns))
    for ax, names in zip(axes, panels, strict=True):
        for name in names:
            for group, style in zip(dict.fromkeys(row[by] if by else "" for row in rows), ("o-", "s--"), strict=False):
                some = [row for row in rows if not by or row[by] == group]
                label = f"{by}: {group}" if by else name.partition(" (")[0]
                ax.plot([_format(row[x]) for row in some], [row[name] for row in some], style, label=label)
        unit = f"{names[0].split()[0]} (ms)" if len(names) > 1 else names[0]
        ax.set(xlabel=x, ylabel=unit, ylim=(0, None))
        if by or len(names) > 1:
            ax.legend(fontsize="small")
    figure.savefig(path)


# The subcommands: each prints and returns its results, one dict a row, with the units in its keys

COMMANDS: dict[str, tuple[Callable, dict[str, tuple]]] = {}
ARRIVING = {"num_seqs": (24, 512), "prompt_len": ([16, 64], [100, 1024]), "output_len": ([8, 24], [100, 1024])}
LOADS = [0.4, 0.7, 1.0, 1.3]


def command(**defaults: tuple) -> Callable:
    """Make a function a subcommand; its options are these, each with a default for a CPU and one for CUDA."""

    def register(function: Callable[[Namespace], list[dict]]) -> Callable:
        COMMANDS[function.__name__.replace("_", "-")] = function, defaults
        return function

    return register


@command(
    num_seqs=(32, 256), prompt_len=([16, 128], [100, 1024]), output_len=([16, 128], [100, 1024]),
    workload=("uniform", "uniform"), temperature=(0.0, 0.0), max_num_seqs=(32, 256),
    max_num_batched_tokens=(8192, 16384), against=(["nanoserve"], ["nanoserve"]), repeat=(3, 3),
    engine=("", ""),
)  # fmt: skip
def throughput(args: Namespace) -> list[dict]:
    """Many requests at once: tokens/s, latencies, steps, use of the cache; with --against, other engines' time.

    The skewed workload has prompts of 32 tokens and outputs of 25, every eighth of 250. With --plot the engine is
    stepped from outside, which costs a RequestOutput for every token.
    """
    rng = random.Random(args.seed)
    skewed = [(32, 25 if i % 8 else 250) for i in range(args.num_seqs)]
    jobs = make_jobs(args, skewed if args.workload == "skewed" else uniform(args, rng), rng)
    if args.engine:  # how compare() starts a fresh process
        return [time_engine(args, jobs)]
    if args.against != ["nanoserve"]:
        return show(compare(args, jobs))
    llm = make_llm(args, jobs, max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens)
    if args.plot:
        timeline = Timeline(args.max_num_seqs)
        run = drive(llm, jobs, "requests", timeline)
        timeline.plot(args.plot)
    else:
        before, begin = llm.get_metrics(), time.time()
        params = [replace(job.params, temperature=args.temperature) for job in jobs]
        outputs = llm.generate([job.prompt for job in jobs], params)
        run = finish(llm, jobs, dict(zip([job.name for job in jobs], outputs, strict=True)), begin, before, {})
    counts, runner = run.counters, llm.runner
    row = {"requests": len(jobs), **run.rates(), **run.latencies(), "steps": counts["num_steps"]}
    row["mean batch (output tokens/step)"] = counts["generation_tokens"] / counts["num_steps"]
    row["K/V cache"] = f"{runner.num_blocks} blocks of {runner.block_size} tokens"
    row["preemptions"] = counts["num_preemptions"]
    row["prefix cache hits (% of prompt tokens)"] = 100 * counts["prefix_cache_hits"] / counts["prompt_tokens"]
    row["attention"], row["dtype"] = runner.backend.name, str(runner.dtype)
    if args.device_name in BANDWIDTHS:
        token_bytes = runner.block_bytes / runner.block_size
        num_bytes = min_bytes(jobs, counts["num_steps"], weight_bytes(llm), token_bytes)
        row["least time at the memory's bandwidth (s)"] = least = num_bytes / BANDWIDTHS[args.device_name]
        row["measured / least time"] = row["time (s)"] / least
    return show([row])


def weight_bytes(llm: LLM) -> int:
    """Of the weights that a step reads as a whole: an embedding only if it is the output matrix as well."""
    import torch

    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in CausalLM(llm.config.hf_config, None).named_parameters()}
    if "lm_head.weight" in sizes:
        del sizes["model.embed_tokens.weight"]
    return sum(sizes.values()) * llm.runner.dtype.itemsize


def min_bytes(jobs: list[Job], num_steps: int, weight_bytes: float, token_bytes: float) -> float:
    """What must be read at the least: all weights in each step, and for each token after a first its context's K/V."""
    contexts = sum((job.num_output - 1) * (len(job.prompt) + job.num_output / 2) for job in jobs)
    return num_steps * weight_bytes + contexts * token_bytes


@command(batches=(4, 8), shrink=(10, 1))
def static(args: Namespace) -> list[dict]:
    """Section 2's batch, and a queue of --batches such batches, under static and under continuous batching.

    Steps are counted for the chapter's lengths, and times measured for lengths divided by --shrink.
    """
    rng = random.Random(args.seed)
    lengths = [*CHAPTER_BATCH, *(n for _ in range(args.batches - 1) for n in rng.sample(CHAPTER_BATCH, 8))]
    jobs = make_jobs(args, [(16, n) for n in lengths], rng)
    short = [replace(job, num_output=max(1, job.num_output // args.shrink)) for job in jobs]
    cases = {"the chapter's batch": jobs[:8], f"{args.batches} batches": jobs, f"lengths / {args.shrink}": short}
    llm, rows, timelines = make_llm(args, short, max_num_seqs=8), [], []
    for case, some in cases.items():
        for name, scheduler_cls in SCHEDULERS.items():
            timelines.append(Timeline(8, static=name == "static"))
            row = {"time (s)": "-", "output (tokens/s)": "-", "mean queueing (ms)": "-"}
            if some is short:
                use_scheduler(llm, scheduler_cls)
                run = drive(llm, some, name, timelines[-1])
                row = {name: (run.rates() | run.latencies())[name] for name in row}
            else:
                limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 516}
                simulate(scheduler_cls(BlockManager(8 * 516, 1), **limits), some, timelines[-1])
            rows.append({"requests": case, "batching": name, **slot_use(timelines[-1], len(some)), **row})
    show(rows)
    steps, seconds = (rows[-1][name] / rows[-2][name] for name in ("steps", "time (s)"))
    print(f"Rows without a time are counted, by the real schedulers without a model; the others ran on {args.model}:")
    print(f"continuous batching needed {steps:.0%} of the steps and {seconds:.0%} of the time. The static baseline is")
    print("a kind one: its idle slots cost nothing, where a padded batch would compute them.")
    if args.plot:
        figure, axes = make_figure(2, 1, 10, 6, sharex=True)
        for ax, name, timeline in zip(axes, SCHEDULERS, timelines[2:], strict=False):
            timeline.draw_slots(ax)
            ax.set_title(f"{name} batching: {len(timeline.steps)} steps", loc="right", fontsize="medium")
            ax.set(xlabel="step", xlim=(0, len(timelines[2].steps)))
            ax.label_outer()
        figure.savefig(args.plot)
    return rows


def slot_use(timeline: Timeline, num_jobs: int) -> dict[str, float]:
    counts, waited = timeline.slot_steps(), [cell for cells in timeline.steps for cell in cells.values()]
    kinds = {"generating": counts[Cell.PREFILL] + counts[Cell.DECODE], "idle after finishing": counts[Cell.IDLE]}
    row = {"steps": len(timeline.steps), "slot-steps": counts.total()}
    row |= {f"{name} (%)": 100 * n / counts.total() for name, n in (kinds | {"empty": counts[None]}).items()}
    return row | {"mean queueing (steps)": waited.count(Cell.WAITING) / num_jobs}


@command(sizes=([1, 2, 4, 8, 16, 32], [1, 4, 16, 64, 128, 256]), prompt_tokens=(32, 128), output_tokens=(16, 128))
def batch_size(args: Namespace) -> list[dict]:
    """max_num_seqs from 1 up, with two requests for each place: throughput rises, and so does TPOT (section 7)."""
    lengths = [(args.prompt_tokens, args.output_tokens)] * 2 * max(args.sizes)
    jobs = make_jobs(args, lengths, random.Random(args.seed))
    llm, rows = make_llm(args, jobs, max_num_seqs=max(args.sizes)), []
    for size in args.sizes:
        use_scheduler(llm, max_num_seqs=size)
        run = drive(llm, jobs[: 2 * size], f"max_num_seqs {size}")
        tpot = {f"TPOT P{p} (ms)": percentile(run.tpot(), p) for p in (50, 95)}
        rows.append({"max_num_seqs": size, "requests": 2 * size, **run.rates(), **tpot})
    if args.plot:
        plot_rows(args.plot, rows, "max_num_seqs", [["output (tokens/s)"], ["TPOT P50 (ms)"]])
    return show(rows)


@command(num_seqs=(4, 32), output_tokens=(64, 512), long_prompt=(2048, 16384), chunk=(64, 512))
def chunked_prefill(args: Namespace) -> list[dict]:
    """A very long prompt joins requests that decode: the gaps between their tokens with it whole, and in chunks."""
    rng = random.Random(args.seed)
    jobs = make_jobs(args, [*[(16, args.output_tokens)] * args.num_seqs, (args.long_prompt, 1)], rng)
    jobs[-1] = replace(jobs[-1], name="long", from_step=10)
    settings = {"no limit": {}, f"threshold {args.chunk}": {"long_prefill_token_threshold": args.chunk}}
    settings[f"budget {args.chunk}"] = {"max_num_batched_tokens": args.chunk}
    whole = args.long_prompt + args.num_seqs
    llm, rows = make_llm(args, jobs, max_num_seqs=args.num_seqs + 1, max_num_batched_tokens=whole), []
    figure, axes = make_figure(1, 1, 9, 4) if args.plot else (None, [])
    for name, limits in settings.items():
        use_scheduler(llm, **limits)
        run = drive(llm, jobs, name)
        gaps = [gap for job in jobs[:-1] for gap in np.diff(run.token_times[job.name])]
        long = run.outputs["long"].metrics
        row = {"tokens per step": name, "steps": run.counters["num_steps"], "gap P50 (ms)": percentile(gaps, 50)}
        row |= {"worst gap (ms)": percentile(gaps, 100)}
        row["TTFT of the long prompt (ms)"] = 1e3 * (long.first_token_time - long.arrival_time)
        row |= {name: run.rates()[name] for name in ("time (s)", "prompt + output (tokens/s)")}
        first = rows[0] if rows else row
        row["worst gap is smaller (times)"] = first["worst gap (ms)"] / row["worst gap (ms)"]
        rows.append(row | {"throughput lost (%)": 100 * (1 - first["time (s)"] / row["time (s)"])})
        for ax in axes:
            times = np.array(run.token_times["0"]) - long.arrival_time
            ax.plot(times[1:], 1e3 * np.diff(times), ".-", linewidth=1, label=name)
            ax.set(xlabel="time since the long prompt arrived (s)", ylabel="gap between tokens (ms)", yscale="log")
    if figure:
        axes[0].legend(title=f"a prompt of {args.long_prompt} tokens", fontsize="small")
        figure.savefig(args.plot)
    return show(rows)


@command(num_seqs=(8, 64), prompt_tokens=(48, 1024), output_tokens=(48, 1024), cache=([100, 60, 40], [100, 60, 40, 30]))
def preemption(args: Namespace) -> list[dict]:
    """A shrinking K/V cache: preemptions, recomputed tokens, and how many the prefix cache saves (section 6.3)."""
    lengths = [(args.prompt_tokens, args.output_tokens)] * args.num_seqs
    jobs = make_jobs(args, lengths, random.Random(args.seed))
    llm, rows = make_llm(args, jobs, max_num_seqs=args.num_seqs), []
    each = cdiv(args.prompt_tokens + args.output_tokens - 1, llm.runner.block_size)
    for share in args.cache:
        for caching in "off", "on":
            num_blocks = max(each, round(share / 100 * each * args.num_seqs))
            use_scheduler(llm, num_blocks=num_blocks, enable_prefix_caching=caching == "on")
            run = drive(llm, jobs, f"{num_blocks} blocks, prefix cache {caching}")
            row = {"cache (% of need)": share, "K/V blocks": num_blocks, "prefix cache": caching}
            row |= {"steps": run.counters["num_steps"], "preemptions": run.counters["num_preemptions"]}
            row["recomputed (tokens)"] = again = run.counters["recomputed_tokens"]
            without = rows[-1]["recomputed (tokens)"] if caching == "on" else again
            row["saved by prefix cache (%)"] = 100 * (1 - again / without) if without else 0.0
            rows.append(row | run.rates())
    if args.plot:
        panels = [["preemptions"], ["recomputed (tokens)"], ["output (tokens/s)"]]
        plot_rows(args.plot, rows, "cache (% of need)", panels, by="prefix cache")
    return show(rows)


@command(
    **ARRIVING, max_num_seqs=(8, 256), loads=(LOADS, LOADS), capacity=(0.0, 0.0), trace=("", ""),
    length_scale=(0.05, 1.0),
)  # fmt: skip
def load(args: Namespace) -> list[dict]:
    """Requests arriving over time, Poisson or from a trace, at several rates: latency against load (section 7).

    --loads are shares of --capacity, in requests/s; 0: as measured when all requests are there at once. --trace is a
    CSV file with arrived_at,num_prefill_tokens,num_decode_tokens, whose lengths are multiplied by --length-scale.
    """
    rng = random.Random(args.seed)
    arrivals, lengths = list(accumulate(rng.expovariate(1) for _ in range(args.num_seqs))), uniform(args, rng)
    if args.trace:
        with open(args.trace, newline="") as file:
            trace = list(csv.DictReader(file))[: args.num_seqs]
        arrivals, columns = [float(row["arrived_at"]) for row in trace], ("num_prefill_tokens", "num_decode_tokens")
        lengths = [[max(1, round(int(row[name]) * args.length_scale)) for name in columns] for row in trace]
    jobs = make_jobs(args, lengths, rng)
    llm, rows = make_llm(args, jobs, max_num_seqs=args.max_num_seqs), []
    capacity = args.capacity or measure_capacity(llm, jobs)
    for rate in np.multiply(capacity, args.loads).tolist():
        use_scheduler(llm)
        run = drive(llm, arriving(jobs, arrivals, rate), f"{rate:.2f} requests/s")
        rows.append({"arriving (requests/s)": rate, "requests": len(jobs), **run.rates(), **run.latencies()})
    if args.plot:
        panels = [["finished (requests/s)"], ["mean queueing (ms)"]]
        panels += [[f"{name} P{p} (ms)" for p in (50, 95, 99)] for name in ("TTFT", "TPOT")]
        plot_rows(args.plot, rows, "arriving (requests/s)", panels)
    return show(rows)


def measure_capacity(llm: LLM, jobs: list[Job]) -> float:
    """Requests per second when all of them are there at once."""
    use_scheduler(llm)
    rate = drive(llm, jobs, "capacity").rates()["finished (requests/s)"]
    print(f"When all requests are there at once, {rate:.2f} of them are finished a second.")
    return rate


def arriving(jobs: list[Job], arrivals: list[float], rate: float) -> list[Job]:
    """The jobs at these times, stretched so that `rate` of them arrive per second."""
    unit = (len(jobs) - 1) / (arrivals[-1] - arrivals[0]) / rate
    return [replace(job, at=(at - arrivals[0]) * unit) for job, at in zip(jobs, arrivals, strict=True)]


@command(**ARRIVING, max_num_seqs=(4, 64))
def priority(args: Namespace) -> list[dict]:
    """The same overload under FCFS and PRIORITY: what every fourth, urgent request gains, what the others pay."""
    rng = random.Random(args.seed)
    arrivals = list(accumulate(rng.expovariate(1) for _ in range(args.num_seqs)))
    jobs = [replace(job, priority=int(i % 4 > 0)) for i, job in enumerate(make_jobs(args, uniform(args, rng), rng))]
    llm, rows = make_llm(args, jobs, max_num_seqs=args.max_num_seqs), []
    jobs = arriving(jobs, arrivals, 2 * measure_capacity(llm, jobs))
    for policy in "fcfs", "priority":
        use_scheduler(llm, policy=policy)
        run = drive(llm, jobs, policy)
        for i, who in enumerate(("urgent", "others")):
            part = replace(run, jobs=[job for job in jobs if job.priority == i])
            row = {"policy": policy, "kind": who, "requests": len(part.jobs), **part.latencies()}
            row["mean latency (ms)"] = 1e3 * mean(part.since_arrival("finished_time"))
            rows.append(row | {"output of all (tokens/s)": run.rates()["output (tokens/s)"]})
    if args.plot:
        panels = [[f"{name} (ms)"] for name in ("mean queueing", "TTFT P95", "mean latency")]
        plot_rows(args.plot, rows, "policy", panels, by="kind")
    return show(rows)


@command(num_seqs=(8, 64), output_tokens=(96, 256), num_speculative_tokens=(3, 3), prompt_lookup=([2, 4], [2, 4]))
def speculative(args: Namespace) -> list[dict]:
    """Drafts by n-grams, off and on: a list to go on repeating, greedily, and prose sampled at temperature 1.

    The same seeds give the same tokens with drafts as without, so that both runs compute the same outputs.
    """
    low, high = args.prompt_lookup
    options = {"num_speculative_tokens": args.num_speculative_tokens}
    options |= {"prompt_lookup_min": low, "prompt_lookup_max": high}
    lists = [", ".join([f"{word} {i}" for word in ("red", "green", "blue", "gold")] * 4) for i in range(args.num_seqs)]
    prose = [f"Chapter {i}. On that morning" for i in range(args.num_seqs)]
    llm = LLM(str(args.folder), seed=args.seed, max_num_seqs=args.num_seqs, max_model_len=args.output_tokens + 256,
              speculative_config=options, **args.engine_options)
    llm.generate([[0], [1]], SamplingParams(max_tokens=2), use_tqdm=False)
    drafter, rows, expected = llm.drafter, [], []
    for name, prompts, temperature in ("repetitive", lists, 0.0), ("prose", prose, 1.0):
        limits = {"temperature": temperature, "max_tokens": args.output_tokens, "ignore_eos": True}
        params = [SamplingParams(seed=i, **limits) for i in range(args.num_seqs)]
        for drafts in "off", "on":
            use_scheduler(llm)
            llm.drafter = drafter if drafts == "on" else None
            before, begin = llm.get_metrics(), time.perf_counter()
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            seconds, after = time.perf_counter() - begin, llm.get_metrics()
            count = {key: after[key] - before[key] for key in after}
            drafted, accepted = count["num_draft_tokens"], count["num_accepted_tokens"]
            row = {"workload": name, "drafts": drafts, "steps": count["num_steps"], "time (s)": seconds}
            row |= {"output (tokens/s)": count["generation_tokens"] / seconds, "drafted (tokens)": drafted}
            row |= {"accepted (%)": 100 * accepted / drafted if drafted else 0.0}
            row["tokens per verified draft"] = 1 + accepted / count["num_drafts"] if count["num_drafts"] else 1.0
            first = rows[-1] if drafts == "on" else row
            row |= {"steps / without": row["steps"] / first["steps"], "time / without": seconds / first["time (s)"]}
            expected = expected if drafts == "on" else outputs
            row["equal outputs"] = sum(a == b for a, b in zip(outputs, expected, strict=True))
            rows.append(row)
    return show(rows)


# Where a step's time goes


class Stopwatch:
    """Adds up the seconds that calls take, under the name of each."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of `owner` by one that is timed."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        setattr(owner, attribute, timed)


@command(running=([1, 8, 64, 256, 512],) * 2, context=(1000, 1000), steps=(40, 40))
def host(args: Namespace) -> list[dict]:
    """What the host does in a step, by part, with the model replaced by a stub: medians over --steps steps.

    All running requests decode behind a prompt of --context tokens; in mixed steps every eighth of them takes 32 tokens
    of a longer prompt instead.
    """
    rows = []
    with tempfile.TemporaryDirectory() as work:
        args.folder = write_shape("stub", Path(work))
        args.engine_options = {"block_size": 16} | args.engine_options | {"load_format": "dummy", "enforce_eager": True}
        for kind, num_running in product(("decode", "mixed"), args.running):
            num_chunks = num_running // 8 if kind == "mixed" else 0
            if kind == "mixed" and not num_chunks:
                continue
            lengths = [(args.context, 2 * args.steps)] * (num_running - num_chunks)
            lengths += [(32 * args.steps + 64, 1)] * num_chunks
            args.vocab_size = SHAPES["stub"]["vocab_size"]
            jobs = make_jobs(args, lengths, random.Random(args.seed))
            llm = make_llm(args, jobs, max_num_seqs=num_running)
            seconds = time_host(llm, jobs[: num_running - num_chunks], jobs[num_running - num_chunks :], args.steps)
            row = {"step": kind, "running": num_running} | {f"{name} (ms)": 1e3 * s for name, s in seconds.items()}
            rows.append(row | {"per request (us)": 1e6 * seconds["sum"] / num_running})
    return show(rows)


def time_host(llm: LLM, decoding: list[Job], chunked: list[Job], num_steps: int) -> dict[str, float]:
    """Median seconds of each part of a step: `sum` is of the three before it, `rest` is the metrics.

    On top of them come the plan for plain PyTorch's attention, which no other backend needs, and what LLM.step spends
    on the text and the RequestOutput of every request, which generate() makes at its end only.
    """
    import torch

    runner, watch = llm.runner, Stopwatch()
    logits = torch.zeros(llm.config.max_num_seqs, 64, device=runner.device)
    for job in decoding:
        llm.add_request(job.name, job.prompt, job.params)
    while not all(request.output_token_ids for request in llm.scheduler.requests.values()):
        llm.step()
    for job in chunked:
        llm.add_request(job.name, job.prompt, job.params)
    llm.scheduler.long_prefill_token_threshold = 32
    runner._forward = lambda groups, buffer, shape: logits[: shape.num_samples]
    watch.watch(llm.scheduler, "schedule", "schedule")
    watch.watch(llm.scheduler, "update_from_output", "update")
    watch.watch(runner, "launch", "execute")
    watch.watch(runner, "_forward", "stub")
    watch.watch(model_runner, "sample", "stub")
    watch.watch(model_runner, "group_rows", "groups")
    watch.watch(llm, "_step", "step")
    watch.watch(llm, "step", "step and outputs")
    samples = []
    for i in range(num_steps):
        watch.seconds.clear()
        (llm._step if i < num_steps * 3 // 4 else llm.step)()
        samples.append(Counter(watch.seconds))
    model_runner.sample, model_runner.group_rows = sample, group_rows
    outputs = median(each["step and outputs"] - each["step"] for each in samples[num_steps * 3 // 4 :])
    part = {name: median(each[name] for each in samples[: num_steps * 3 // 4]) for name in samples[0]}
    prepare = part["execute"] - part["stub"] - part["groups"]
    parts = {"schedule": part["schedule"], "prepare": prepare, "update": part["update"]}
    total = sum(parts.values())
    rest = part["step"] - part["stub"] - part["groups"] - total
    return parts | {"sum": total, "rest": rest, "plain attention's plan": part["groups"], "outputs": outputs}


@command(running=([1, 8, 32],) * 2, context=(128, 128), steps=(40, 40))
def breakdown(args: Namespace) -> list[dict]:
    """Where a decode step's time goes on a CPU: mean milliseconds of each part over --steps steps."""
    if args.cuda:
        sys.exit("breakdown times calls, and on CUDA these return before their work is done: pass --device cpu")
    lengths = [(args.context, args.steps + 2)] * max(args.running)
    jobs, rows = make_jobs(args, lengths, random.Random(args.seed)), []
    llm, watch = make_llm(args, jobs, max_num_seqs=max(args.running)), Stopwatch()
    causal_lm = llm.runner.model
    for module in causal_lm.modules():
        if isinstance(module, Linear):
            watch.watch(module, "forward", "logits" if module is causal_lm.lm_head else "layers")
        elif hasattr(module, "attend"):
            watch.watch(module, "attend", "attention")
    watch.watch(causal_lm, "forward", "model")
    watch.watch(model_runner, "sample", "sampling")
    watch.watch(llm, "_step", "step")
    for num_running in args.running:
        use_scheduler(llm, max_num_seqs=num_running)
        for job in jobs[:num_running]:
            llm.add_request(job.name, job.prompt, job.params)
        llm.step()
        watch.seconds.clear()
        for _ in range(args.steps):
            llm._step()
        part = watch.seconds
        row = {"step": part["step"], "linears": part["layers"] + part["logits"], "attention": part["attention"]}
        row["elementwise and K/V"] = part["model"] - part["layers"] - part["attention"]
        row["sampling"] = part["sampling"]
        row["host"] = part["step"] - part["model"] - part["logits"] - part["sampling"]
        rows.append({"running": num_running} | {f"{name} (ms)": 1e3 * s / args.steps for name, s in row.items()})
        llm.abort_request([job.name for job in jobs[:num_running]])
    model_runner.sample = sample
    return show(rows)


# Other engines


def compare(args: Namespace, jobs: list[Job]) -> list[dict]:
    """The same jobs through every engine that runs here, alternating, each time in a fresh process."""
    seconds: dict[str, list[float]] = {}
    for engine in dict.fromkeys(("nanoserve", *args.against)):
        if util.find_spec(MODULES[engine]):
            seconds[engine] = []
        else:
            print(f"{engine} is left out: there is no module {MODULES[engine]}")
    if "nano-vllm" in seconds and args.temperature == 0:
        args.temperature = 0.6
        print("nano-vllm cannot decode greedily: every engine samples, at temperature 0.6")
    with tempfile.TemporaryDirectory() as work:
        for engine in tqdm([*seconds] * args.repeat, desc="runs"):
            if engine in seconds:
                own = ["--engine", engine, "--temperature", str(args.temperature), "--json", f"{work}/json"]
                child = subprocess.run([sys.executable, __file__, *args.argv, *own], capture_output=True, text=True)
                if child.returncode == 0:
                    seconds[engine] += [
                        row["time (s)"] for row in json.loads(Path(work, "json").read_text())["results"]
                    ]
                elif engine == "nanoserve":
                    sys.exit(child.stderr)
                else:
                    del seconds[engine]
                    tqdm.write(f"{engine} is left out, it failed: {child.stderr.strip().splitlines()[-1:]}")
    if "transformers" in seconds:
        print("transformers: generate() on static left-padded batches of max_num_seqs, in order of arrival")
    rows, num_output = [], sum(job.num_output for job in jobs)
    for engine, times in seconds.items():
        row = {"engine": engine, "runs": len(times), "median time (s)": median(times), "fastest (s)": min(times)}
        row |= {"slowest (s)": max(times), "output (tokens/s)": num_output / median(times)}
        rows.append(row | {"time / nanoserve's": median(times) / median(seconds["nanoserve"])})
    return rows


def time_engine(args: Namespace, jobs: list[Job]) -> dict:
    """One timed run of --engine in this process, after a warm-up that shares no prefix with the jobs."""
    options = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    options |= {"max_model_len": max(len(job.prompt) + job.num_output for job in jobs)}
    options |= {"dtype": "auto" if args.cuda else "float32"}
    names = ENGINE_OPTIONS if args.engine == "nanoserve" else ("dtype", "load_format", "enforce_eager")
    options |= {name: value for name, value in args.engine_options.items() if name in names}
    generate = (load_transformers if args.engine == "transformers" else load_llm)(args, options)
    generate([[0] * 8, [1] * 8], [4, 4])
    begin, lengths = time.perf_counter(), [job.num_output for job in jobs]
    if generate([job.prompt for job in jobs], lengths) != lengths:
        sys.exit(f"{args.engine} did not generate as many tokens as it was asked for")
    return {"engine": args.engine, "time (s)": time.perf_counter() - begin}


def load_llm(args: Namespace, options: dict[str, Any]) -> Callable[[list, list], list[int]]:
    """nanoserve, vLLM or nano-vllm, whose offline APIs are alike; nano-vllm ignores options that it does not know."""
    module = import_module(MODULES[args.engine])
    llm = module.LLM(str(args.folder), **options)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        same = {"temperature": args.temperature, "ignore_eos": True}
        params = [module.SamplingParams(max_tokens=n, **same) for n in lengths]
        if args.engine == "nano-vllm":
            return [len(output["token_ids"]) for output in llm.generate(prompts, params, use_tqdm=False)]
        wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(output.outputs[0].token_ids) for output in llm.generate(wrapped, params, use_tqdm=False)]

    return generate


def load_transformers(args: Namespace, options: dict[str, Any]) -> Callable[[list, list], list[int]]:
    """generate() on static batches of max_num_seqs requests in order of arrival, left-padded, with SDPA attention.

    A batch runs until its longest output is done; only the tokens that were asked for count.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(args.folder)
    dtype = config.dtype if options["dtype"] == "auto" else getattr(torch, options["dtype"])
    device = torch.device("cuda" if args.cuda else "cpu")
    if options.get("load_format") == "dummy":
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # the checkpoint's own would end outputs at EOS
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        done, size = [], options["max_num_seqs"]
        for i in range(0, len(prompts), size):
            batch, wanted = prompts[i : i + size], lengths[i : i + size]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=device)
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device)
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(wanted), **how).tolist()
            done += [len(row[width : width + n]) for row, n in zip(out, wanted, strict=True)]
        return done

    return generate


# The command line


def write_shape(name: str, folder: Path) -> Path:
    """A model folder without weights: a config, and a tokenizer with as many tokens as the model has."""
    from tokenizers import Tokenizer, models

    vocab = {f"token{i}": i for i in range(SHAPES[name]["vocab_size"])}
    Tokenizer(models.WordLevel(vocab, unk_token="token0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


ENGINE_OPTIONS = {"dtype": str, "load_format": str, "device": str, "attention_backend": str}
ENGINE_OPTIONS |= {"block_size": int, "num_gpu_blocks_override": int, "enforce_eager": bool}
CHOICES = {"against": list(MODULES), "engine": list(MODULES), "workload": ["uniform", "skewed"]}


def parse(argv: list[str]) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, (function, options) in COMMANDS.items():
        add = commands.add_parser(
            name, help=function.__doc__.splitlines()[0], description=function.__doc__
        ).add_argument
        add("--model", default="demo", help=f"a folder, a hub id, demo, or the shape of {', '.join(SHAPES)}")
        add("--plot", metavar="FILE.png", help="draw a figure")
        add("--json", metavar="FILE", help="write the results")
        add("--seed", type=int, default=0)
        for option, kind in ENGINE_OPTIONS.items():
            how = {"action": "store_true", "default": None} if kind is bool else {"type": kind}
            add(f"--{option.replace('_', '-')}", help="as in LLM()", **how)
        for option, (cpu, cuda) in options.items():
            kind, nargs = type(cpu), None
            if isinstance(cpu, list):
                kind, nargs = type(cpu[0]), 2 if option.endswith("_len") else "+"
            text = f"default: {cpu}" + (f", on CUDA {cuda}" if cuda != cpu else "")
            add(f"--{option.replace('_', '-')}", type=kind, nargs=nargs, choices=CHOICES.get(option), help=text)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict]:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv = ["throughput", *argv]
    args = parse(argv)
    import torch
    import transformers

    args.argv, args.cuda = argv, args.device != "cpu" and torch.cuda.is_available()
    for option, pair in COMMANDS[args.command][1].items():
        if getattr(args, option) is None:
            setattr(args, option, pair[args.cuda])
    args.device_name = torch.cuda.get_device_name() if args.cuda else f"CPU, {torch.get_num_threads()} threads"
    args.engine_options = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    if args.plot and not util.find_spec("matplotlib"):
        sys.exit("--plot needs matplotlib: pip install 'nanoserve[plot]'")
    versions = {"nanoserve": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"python": platform.python_version(), "device": args.device_name, "model": args.model}
    options = {name: getattr(args, name) for name in COMMANDS[args.command][1]}
    with tempfile.TemporaryDirectory() as work:
        if args.model in SHAPES:
            args.folder, args.engine_options["load_format"] = write_shape(args.model, Path(work)), "dummy"
        else:
            args.folder = find_model(args.model)
        args.vocab_size = min(10000, load_config(args.folder).vocab_size)
        for line in versions, options:
            print(", ".join(f"{name} {value}" for name, value in line.items() if value != ""))
        print()
        rows = COMMANDS[args.command][0](args)
    if args.json:
        report = {"command": args.command, "versions": versions, "options": options, "results": rows}
        Path(args.json).write_text(json.dumps(report, indent=2))
    return rows


if __name__ == "__main__":
    main()
