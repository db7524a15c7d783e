"""bench.py: its metrics worked out by hand, and each subcommand once on a tiny random model.

Where a result depends on time, time is simulated: a step lasts a millisecond for each of its tokens.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from bench import Job, Run
from nanoserve import LLM
from nanoserve.loader import load_config, load_tokenizer
from nanoserve.model import CausalLM
from nanoserve.model_runner import ModelRunner
from nanoserve.request import RequestMetrics
from nanoserve.scheduler import StaticBatchScheduler
from timeline import Timeline


@pytest.fixture
def clock(monkeypatch):
    """Simulated time: only steps and sleeping take any."""
    now, launch = SimpleNamespace(time=1000.0), ModelRunner.launch

    def pass_time(seconds):
        assert seconds >= 0
        now.time += seconds

    def timed(self, output):
        pass_time(1e-3 * sum(len(share.token_ids) for share in output.scheduled))
        return launch(self, output)

    monkeypatch.setattr(time, "time", lambda: now.time)
    monkeypatch.setattr(time, "sleep", pass_time)
    monkeypatch.setattr(ModelRunner, "launch", timed)
    return now


@pytest.fixture
def run(llama, tmp_path, figures, capsys):
    """Run a subcommand; its rows, which were also printed and written, and the panels of its one figure."""

    def run(line, plot=True):
        figures.clear()
        files = ["--json", str(tmp_path / "out.json"), *(["--plot", str(tmp_path / "out.png")] if plot else [])]
        rows = bench.main([*line.split(), "--model", llama[0], *files])
        assert json.loads((tmp_path / "out.json").read_text())["results"] == rows
        printed = capsys.readouterr().out
        words = {word for row in rows for name in row for word in name.split()}
        assert words <= set(printed.split())  # every name, with its unit
        if not plot:
            return rows
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "out.png").stat().st_size < 150_000
        (figure,) = figures
        assert all(axes.get_ylabel() for axes in figure.axes) and figure.axes[-1].get_xlabel()
        return rows, figure.axes

    return run


# Metrics


def make_run(jobs, times, begin=100.0, end=104.0):
    """A run whose jobs were scheduled, got their first token and finished at these times."""
    outputs = {
        job.name: SimpleNamespace(metrics=RequestMetrics(0.0, *each)) for job, each in zip(jobs, times, strict=True)
    }
    return Run(jobs, outputs, begin, end, {}, {})


def test_latencies_count_from_the_planned_arrival():
    jobs = [Job("a", [1] * 10, 5), Job("b", [1] * 6, 1, at=1.0), Job("c", [1] * 4, 3, at=2.0)]
    part = make_run(jobs, [(100.5, 101.0, 103.0), (101.0, 102.0, 102.0), (102.25, 103.0, 104.0)])
    assert part.since_arrival("first_scheduled_time") == [0.5, 0.0, 0.25]
    assert part.since_arrival("first_token_time") == [1.0, 1.0, 1.0]
    assert part.tpot() == [2.0 / 4, 1.0 / 2]  # a request of one token has none
    assert part.rates() == {
        "time (s)": 4.0,
        "output (tokens/s)": 9 / 4,
        "prompt + output (tokens/s)": 29 / 4,
        "finished (requests/s)": 3 / 4,
    }
    assert part.latencies()["mean queueing (ms)"] == 250.0
    assert part.latencies()["TTFT P99 (ms)"] == 1000.0


def test_percentiles_lie_between_the_values():
    seconds = [i / 1000 for i in range(101)]
    assert [bench.percentile(seconds, p) for p in (50, 95, 99)] == pytest.approx([50, 95, 99])
    assert bench.percentile([0.001, 0.002], 50) == pytest.approx(1.5)


def test_the_least_number_of_bytes_is_what_each_decode_reads():
    jobs = [Job("a", [1] * 7, 4), Job("b", [1] * 3, 1)]
    contexts = [7 + 1, 7 + 2, 7 + 3]  # a's second to fourth token; a prefill's reads are left out
    assert bench.min_bytes(jobs, 4, 1000, 10) == 4 * 1000 + 10 * sum(contexts)


def test_lengths_and_ids_of_the_uniform_workload():
    args = SimpleNamespace(seed=0, vocab_size=10000, num_seqs=3, prompt_len=[16, 128], output_len=[16, 128])
    rng, expected = random.Random(0), []
    for i in range(3):
        n_in, n_out = rng.randint(16, 128), rng.randint(16, 128)
        expected.append(Job(str(i), [rng.randrange(10000) for _ in range(n_in)], n_out))
    rng = random.Random(0)
    assert bench.make_jobs(args, bench.uniform(args, rng), rng) == expected


def test_arrivals_are_stretched_to_the_rate():
    jobs = bench.arriving([Job(str(i), [1], 1) for i in range(4)], [5.0, 6.0, 6.0, 11.0], rate=2.0)
    assert [job.at for job in jobs] == pytest.approx([0, 0.25, 0.25, 1.5])  # three gaps in 1.5 s


# The loop


def make_llm(llama, **options):
    return LLM(llama[0], max_model_len=128, block_size=4, **options)


def test_a_request_waits_from_its_arrival_even_while_the_engine_is_busy(llama, clock):
    jobs = [Job("first", [5] * 100, 2), Job("second", [6] * 10, 1, at=0.040), Job("late", [7] * 10, 1, at=1.0)]
    run = bench.drive(make_llm(llama), jobs, "test")
    # Steps: 0 to 100 ms, 100 to 111 ms, and after a pause 1000 to 1010 ms.
    assert run.since_arrival("first_scheduled_time") == pytest.approx([0, 0.060, 0])
    assert run.since_arrival("first_token_time") == pytest.approx([0.100, 0.071, 0.010])
    assert run.end - run.begin == pytest.approx(1.010) and run.counters["num_steps"] == 3
    assert [len(run.token_times[job.name]) for job in jobs] == [2, 1, 1]


def test_a_job_can_wait_for_a_step_but_not_for_an_idle_engine(llama, clock):
    jobs = [Job("a", [5] * 4, 3), Job("b", [6] * 4, 1, from_step=2), Job("c", [6] * 4, 1, from_step=50)]
    timeline = Timeline(256)
    run = bench.drive(make_llm(llama), jobs, "test", timeline)
    assert [sorted(cells) for cells in timeline.steps] == [["a"], ["a"], ["a", "b"], ["c"]]
    assert run.counters["num_steps"] == 4


def test_another_scheduler_leaves_no_trace(llama):
    """The same names and prompts, over and over on one engine: always the tokens of a fresh one."""
    llm = make_llm(llama, max_num_seqs=4)
    jobs = [Job(str(i), [i + 5] * (9 + i), 6 + i % 3) for i in range(7)]

    def tokens(**options):
        bench.use_scheduler(llm, **options)
        outputs = bench.drive(llm, jobs, "test").outputs
        assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
        return [outputs[job.name].outputs[0].token_ids for job in jobs], sum(
            o.num_cached_tokens for o in outputs.values()
        )

    first, hits = tokens()
    assert hits == 0
    for options in (
        {"scheduler_cls": StaticBatchScheduler},
        {"num_blocks": 7, "enable_prefix_caching": False},
        {"max_num_seqs": 1, "max_num_batched_tokens": 3},
        {"policy": "priority", "long_prefill_token_threshold": 2},
    ):
        assert tokens(**options)[0] == first
    with pytest.raises(ValueError):
        bench.use_scheduler(llm, num_blocks=llm.runner.num_blocks + 1)


# The subcommands


def test_throughput_is_the_default(run, clock):
    (row,) = run("--num-seqs 5 --prompt-len 8 8 --output-len 4 4 --max-num-seqs 8", plot=False)
    # One step of 5 x 8 tokens and three of 5, a millisecond each token.
    assert row["time (s)"] == pytest.approx(0.055) and row["steps"] == 4
    assert row["output (tokens/s)"] == pytest.approx(20 / 0.055)
    assert row["mean batch (output tokens/step)"] == 5
    assert row["TTFT P50 (ms)"] == pytest.approx(40) and row["TPOT P99 (ms)"] == pytest.approx(5)
    assert row["preemptions"] == 0 and row["prefix cache hits (% of prompt tokens)"] == 0


def test_throughput_is_held_against_the_bandwidth(run, clock, monkeypatch, llama):
    monkeypatch.setitem(bench.BANDWIDTHS, f"CPU, {torch.get_num_threads()} threads", 1e9)
    (row,) = run("--num-seqs 2 --prompt-len 8 8 --output-len 3 3", plot=False)
    weights = {name: p.numel() * 4 for name, p in llama[1].named_parameters()}
    weights.pop("model.embed_tokens.weight")  # two rows of it are read, while the output matrix is read whole
    key_value = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, bytes
    least = (3 * sum(weights.values()) + 2 * (9 + 10) * key_value) / 1e9
    assert row["least time at the memory's bandwidth (s)"] == pytest.approx(least)
    assert row["measured / least time"] == pytest.approx((2 * 8 + 2 + 2) * 1e-3 / least)


def test_throughput_draws_its_timeline(run, clock):
    (row,), panels = run("throughput --num-seqs 5 --prompt-len 8 8 --output-len 4 4 --max-num-seqs 2 --block-size 4")
    assert row["steps"] == 12 and row["requests"] == 5
    assert [axes.get_ylabel() for axes in panels][:2] == ["slot", "request"]


def test_the_skewed_workload(monkeypatch, llama):
    monkeypatch.setattr(
        bench, "time_engine", lambda args, jobs: {"lengths": [(len(j.prompt), j.num_output) for j in jobs]}
    )
    (row,) = bench.main(["--engine", "vllm", "--workload", "skewed", "--num-seqs", "10", "--model", llama[0]])
    assert row["lengths"] == [(32, 250)] + [(32, 25)] * 7 + [(32, 250), (32, 25)]


def test_static_prints_the_chapters_number(run, capsys):
    rows, panels = run("static --batches 2 --shrink 20")
    chapter, _, queue, faster, slow, fast = rows
    assert chapter["steps"] == 500 and chapter["slot-steps"] == 4000
    assert (
        chapter["generating (%)"] == 21.25
        and chapter["idle after finishing (%)"] == 78.75
        and chapter["empty (%)"] == 0
    )
    assert queue["steps"] == 1000 and queue["mean queueing (steps)"] == 250  # half of them wait 500 steps
    assert faster["idle after finishing (%)"] == 0 and faster["steps"] < 700 and faster["mean queueing (steps)"] < 50
    assert slow["steps"] == 2 * 500 // 20 > fast["steps"] and fast["time (s)"] > 0
    assert [axes.get_title(loc="right") for axes in panels][0] == "static batching: 1000 steps"


def test_static_prints_78_75(llama, capsys):
    bench.main(["static", "--batches", "1", "--shrink", "100", "--model", llama[0]])
    assert " 78.75 " in next(line for line in capsys.readouterr().out.splitlines() if "the chapter's batch" in line)


def test_batch_size(run, clock):
    rows, panels = run("batch-size --sizes 1 2 4 --prompt-tokens 6 --output-tokens 5")
    assert [row["requests"] for row in rows] == [2, 4, 8]
    # Every step is one token for each running request here, so TPOT is the batch size in milliseconds.
    assert [row["TPOT P50 (ms)"] for row in rows] == pytest.approx([1, 2, 4])
    assert [axes.get_ylabel() for axes in panels] == ["output (tokens/s)", "TPOT P50 (ms)"]


def test_chunked_prefill_shrinks_the_worst_stall(run, clock):
    rows, (axes,) = run("chunked-prefill --num-seqs 2 --output-tokens 60 --long-prompt 400 --chunk 16")
    whole, threshold, budget = rows
    assert whole["worst gap (ms)"] == pytest.approx(402)  # the prompt and two decodes in one step
    assert threshold["worst gap (ms)"] == pytest.approx(18)
    assert budget["worst gap (ms)"] == pytest.approx(16)
    assert [row["worst gap is smaller (times)"] for row in rows] == pytest.approx([1, 402 / 18, 402 / 16])
    assert [row["throughput lost (%)"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-6)  # the same tokens in all
    assert whole["TTFT of the long prompt (ms)"] == pytest.approx(402)
    assert threshold["TTFT of the long prompt (ms)"] == pytest.approx(400 + 25 * 2)  # 25 chunks beside two decodes
    assert len(axes.get_legend().get_texts()) == 3


def test_preemption(run, clock):
    rows, panels = run("preemption --num-seqs 4 --prompt-tokens 17 --output-tokens 20 --cache 100 40 --block-size 4")
    assert [row["K/V blocks"] for row in rows] == [36, 36, 14, 14]
    enough, _, without, cached = rows
    assert enough["preemptions"] == enough["recomputed (tokens)"] == 0 and enough["steps"] == 20
    assert without["preemptions"] > 0 and without["recomputed (tokens)"] > cached["recomputed (tokens)"]
    saved = 1 - cached["recomputed (tokens)"] / without["recomputed (tokens)"]
    assert (
        cached["saved by prefix cache (%)"] == pytest.approx(100 * saved) and without["saved by prefix cache (%)"] == 0
    )
    # Here every token costs a millisecond, so the recomputed ones are what a small cache costs.
    extra = without["time (s)"] - enough["time (s)"]
    assert extra == pytest.approx(1e-3 * without["recomputed (tokens)"])
    assert len(panels) == 3 and len(panels[0].get_lines()) == 2


def test_load_grows_the_queue(run, clock):
    lengths = "--num-seqs 16 --prompt-len 8 8 --output-len 4 8 --max-num-seqs 2"
    rows, panels = run(f"load {lengths} --loads 0.2 3")
    assert rows[1]["arriving (requests/s)"] == pytest.approx(15 * rows[0]["arriving (requests/s)"])
    assert rows[0]["finished (requests/s)"] == pytest.approx(rows[0]["arriving (requests/s)"], rel=0.15)
    assert rows[1]["mean queueing (ms)"] > 10 * rows[0]["mean queueing (ms)"]
    assert rows[1]["TTFT P50 (ms)"] <= rows[1]["TTFT P95 (ms)"] <= rows[1]["TTFT P99 (ms)"]
    assert [axes.get_ylabel() for axes in panels][2:] == ["TTFT (ms)", "TPOT (ms)"]


def test_load_takes_gaps_and_lengths_from_a_trace(run, clock, monkeypatch, tmp_path):
    driven, drive = [], bench.drive
    monkeypatch.setattr(bench, "drive", lambda llm, jobs, *more: (driven.append(jobs), drive(llm, jobs, *more))[1])
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", "10.0,40,10", "10.0,20,2", "16.0,100,30", "99,9,9"]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    options = f"--trace {tmp_path / 'trace.csv'} --num-seqs 3 --length-scale 0.1 --capacity 4 --loads 0.5"
    (row,) = run(f"load {options}", plot=False)
    (jobs,) = driven
    assert [(len(job.prompt), job.num_output) for job in jobs] == [(4, 1), (2, 1), (10, 3)]
    assert [job.at for job in jobs] == pytest.approx([0, 0, 1.0])  # two gaps in a second: 2 requests/s
    assert row["arriving (requests/s)"] == 2


def test_priority_serves_the_urgent_first(run, clock):
    rows, panels = run("priority --num-seqs 16 --prompt-len 8 8 --output-len 4 8 --max-num-seqs 2")
    fcfs_urgent, fcfs_others, urgent, others = rows
    assert [row["requests"] for row in rows] == [4, 12, 4, 12]
    assert urgent["mean queueing (ms)"] < fcfs_urgent["mean queueing (ms)"] / 2
    assert others["mean queueing (ms)"] > fcfs_others["mean queueing (ms)"]
    assert urgent["mean latency (ms)"] < fcfs_urgent["mean latency (ms)"]
    assert len(panels) == 3


# Other engines


@pytest.mark.parametrize("engine", ["nanoserve", "transformers"])
def test_an_engine_is_timed(engine, llama):
    options = "--num-seqs 5 --prompt-len 3 9 --output-len 2 7 --max-num-seqs 2".split()
    (row,) = bench.main(["--engine", engine, "--model", llama[0], *options])
    assert row["engine"] == engine and row["time (s)"] > 0


def test_transformers_runs_static_left_padded_batches(llama, monkeypatch):
    args = SimpleNamespace(folder=llama[0], cuda=False, temperature=0)
    generate = bench.load_transformers(args, {"dtype": "float32", "max_num_seqs": 2})
    from transformers import GenerationMixin

    calls, original = [], GenerationMixin.generate

    def spy(self, **options):
        calls.append((options["input_ids"].tolist(), options["attention_mask"].tolist(), options["max_new_tokens"]))
        return original(self, **options)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    assert generate([[5, 6, 7], [8], [9, 9]], [2, 4, 3]) == [2, 4, 3]
    assert calls == [([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]], 4), ([[9, 9]], [[1, 1]], 3)]


def test_comparison_alternates_and_leaves_out_what_does_not_run(llama, monkeypatch, capsys):
    times, order = {"nanoserve": iter([2.0, 1.0, 4.0]), "transformers": iter([6.0, 8.0, 7.0])}, []

    def child(command, **options):
        engine, path = command[command.index("--engine") + 1], command[-1]
        assert command[:2] == [sys.executable, bench.__file__] and command[-2] == "--json"
        order.append(engine)
        if engine == "vllm":
            return SimpleNamespace(returncode=1, stderr="Traceback ...\nImportError: no libcuda\n")
        Path(path).write_text(json.dumps({"results": [{"time (s)": next(times[engine])}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None if name in ("nanovllm", "matplotlib") else name)
    options = "--num-seqs 4 --output-len 10 10 --against transformers vllm nano-vllm".split()
    ours, theirs = bench.main(["--model", llama[0], *options])
    assert order == ["nanoserve", "transformers", "vllm"] + ["nanoserve", "transformers"] * 2
    assert (ours["median time (s)"], ours["fastest (s)"], ours["slowest (s)"]) == (2.0, 1.0, 4.0)
    assert ours["output (tokens/s)"] == 40 / 2.0 and theirs["time / nanoserve's"] == 3.5
    printed = capsys.readouterr()
    assert "nano-vllm is left out: there is no module nanovllm" in printed.out
    assert "vllm is left out, it failed" in printed.out + printed.err and "no libcuda" in printed.out + printed.err


# The command line


@pytest.mark.parametrize(
    "name, num_parameters", [("qwen3-0.6b", 596049920), ("qwen3-1.7b", 1720574976), ("llama-3.2-1b", 1235814400)]
)
def test_shapes_have_the_published_number_of_parameters(name, num_parameters, tmp_path):
    config = load_config(bench.write_shape(name, tmp_path))
    with torch.device("meta"):
        model = CausalLM(config, None)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert len(load_tokenizer(tmp_path, config)[0]) == config.vocab_size  # so that every id may be sampled
    llm = SimpleNamespace(config=SimpleNamespace(hf_config=config), runner=SimpleNamespace(dtype=torch.bfloat16))
    assert bench.weight_bytes(llm) == 2 * num_parameters  # tied: the embedding counts, once


def test_an_impossible_command_line_is_refused(llama, monkeypatch):
    for line in ("nonsense", "load --unknown 3", "--workload odd", "--prompt-len 3"):
        with pytest.raises(SystemExit):
            bench.main(line.split())
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="matplotlib"):
        bench.main(["--plot", "figure.png", "--model", llama[0]])
