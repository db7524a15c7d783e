"""Several chat prompts at once, on a small real model that needs no GPU.

python example.py                     # the demo model, SmolLM2-135M-Instruct
python example.py --trace             # and one line per step: who got how many tokens
python example.py --trace trace.html  # and a page to step through, of a small run in which everything happens
python example.py --model Qwen/Qwen3-0.6B
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads do not spin for cores others use
from nanoserve import LLM, RequestOutput, SamplingParams  # noqa: E402

QUESTIONS = [
    "What is the capital of France?",
    "Give me three tips for learning to play the guitar.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a very short story about a fox and a lighthouse.",
]
# The page's run: limits that a few short chats reach, on the CPU, which takes blocks of any size.
PAGE_OPTIONS = dict(block_size=4, num_gpu_blocks_override=22, max_num_batched_tokens=12, max_num_seqs=3,
                    async_scheduling=False, device="cpu")  # fmt: skip
PAGE_SYSTEM = {"role": "system", "content": "Be brief."}  # how all its prompts begin, so that they share blocks
PAGE_REQUESTS = [  # step of arrival, question, what ends the answer besides EOS
    (0, "Why is the sky blue?", {"max_tokens": 26}),
    (0, "What is the capital of France?", {"max_tokens": 26}),
    (3, "Who wrote Hamlet?", {"max_tokens": 40}),
    (9, "What is the capital of Japan?", {"max_tokens": 26}),
    (12, "Write one sentence about a fox.", {"max_tokens": 26, "stop": ","}),
]


class Recording:
    """What trace_template.html shows: the engine as it stands after each step, the step's tokens known."""

    def __init__(self, llm: LLM, questions: Sequence[str]):
        self.llm, self.questions, self.requests, self.steps = llm, questions, {}, []
        self.reached: dict[str, int] = {}  # how many of a request's tokens have been computed at least once

    def step(self) -> list[RequestOutput]:
        scheduler, manager = self.llm.scheduler, self.llm.block_manager
        self.requests |= scheduler.requests  # which forgets those that end
        outputs, step = self.llm.step(), self.llm.last_output
        were_running = self.steps[-1]["running"] if self.steps else []
        shares, events = [], [("preempted", name) for name in sorted(step.preempted_req_ids)]
        for name, token_ids, start, block_ids, *_ in step.scheduled:
            if name not in were_running:  # it starts after the tokens that it found in the cache
                events.append(("resumed" if name in self.reached else "admitted", name, start))
            reached, is_prompt = self.reached.get(name, 0), start < self.requests[name].num_prompt_tokens
            kind = "recompute" if start < reached else "prefill" if is_prompt else "decode"
            shares.append((name, start, len(token_ids), kind, block_ids))
            self.reached[name] = max(reached, start + len(token_ids))
        ends = [(output.request_id, output.outputs[0]) for output in outputs if output.finished]
        events += [("finished", name, end.finish_reason, end.stop_reason) for name, end in ends]
        running, waiting = ([r.request_id for r in queue] for queue in (scheduler.running, scheduler.waiting))
        self.steps.append({
            "shares": shares, "events": events, "running": running, "waiting": waiting,
            "progress": {name: (r.num_computed_tokens, r.num_tokens) for name, r in scheduler.requests.items()},
            "tables": {name: manager.block_table(name) for name in running},
            "free": [*manager._free],  # next to be handed out first
            "cached": [block for block in manager._free if manager._block_hash[block] is not None],
            "texts": {output.request_id: output.outputs[0].text for output in outputs},
        })  # fmt: skip
        return outputs

    def page(self) -> str:
        config, manager, decode = self.llm.config, self.llm.block_manager, self.llm.tokenizer.decode
        limits = {name: getattr(config, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
        limits |= dict(num_blocks=manager.num_blocks, block_size=manager.block_size, model=Path(config.model).name)
        requests = {
            name: {"num_prompt_tokens": r.num_prompt_tokens, "tokens": [decode([i]) for i in r.token_ids],
                   "question": question}
            for question, (name, r) in zip(self.questions, self.requests.items(), strict=True)
        }  # fmt: skip
        data = json.dumps({**limits, "requests": requests, "steps": self.steps})
        template = Path(__file__).with_name("trace_template.html").read_text(encoding="utf-8")
        return template.replace("TRACE_DATA", data.replace("<", "\\u003c"))  # no text can end the script element


def trace(llm: LLM, conversations: list, params: list[SamplingParams], arrivals: list[int],
          recording: Recording | None = None) -> list[RequestOutput]:  # fmt: skip
    """llm.chat step by step, each conversation from its step of arrival on: a line a step, from its output alone."""
    coming, finished = list(zip("ABCDEFGH", arrivals, llm.preprocess_chat(conversations), params, strict=False)), {}
    while coming or llm.has_unfinished_requests():
        while coming and coming[0][1] <= (llm.last_output.step + 1 if llm.last_output else 0):
            name, _, prompt, limits = coming.pop(0)
            llm.add_request(name, prompt, limits)
        outputs = (recording or llm).step()
        done = {output.request_id: output for output in outputs if output.finished}
        finished |= done
        step = llm.last_output
        shares = " ".join(f"{share.request_id}:{len(share.token_ids)}" for share in step.scheduled)
        line = f"step {step.step:3d} | tokens {shares:24s} | waiting {len(llm.scheduler.waiting)}"
        line += f" | free blocks {step.num_free_blocks}"
        for word, ids in ("preempted", step.preempted_req_ids), ("finished", done):
            line += f" | {word} {' '.join(sorted(ids))}" if ids else ""
        print(line)
    return [finished[name] for name in sorted(finished)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a local folder or a hub id (default: the demo model)")
    parser.add_argument("--trace", nargs="?", const="", metavar="FILE", help="a line per step; with FILE also a page")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    requests = [(0, question, {"max_tokens": args.max_tokens}) for question in QUESTIONS]
    options, system = {"max_model_len": 2048}, []
    if args.trace:
        requests, options, system = PAGE_REQUESTS, PAGE_OPTIONS, [PAGE_SYSTEM]
    arrivals, questions, limits = zip(*requests, strict=True)
    llm = LLM(args.model, **options)
    params = [SamplingParams(temperature=args.temperature, **each) for each in limits]
    chats = [[*system, {"role": "user", "content": question}] for question in questions]
    recording = Recording(llm, questions) if args.trace else None
    outputs = llm.chat(chats, params) if args.trace is None else trace(llm, chats, params, arrivals, recording)
    if recording:
        Path(args.trace).write_text(recording.page(), encoding="utf-8")
    for question, output in zip(questions, outputs, strict=True):
        completion = output.outputs[0]
        print(f"\n> {question}\n{completion.text.strip()}")
        print(f"  [{len(completion.token_ids)} tokens, {completion.finish_reason}]")


if __name__ == "__main__":
    main()
