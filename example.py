"""Several chat prompts at once, on a small real model that needs no GPU.

python example.py                     # the demo model, SmolLM2-135M-Instruct
python example.py --trace             # and one line per step: who got how many tokens
python example.py --model Qwen/Qwen3-0.6B
"""

import argparse

from nanoserve import LLM, RequestOutput, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Give me three tips for learning to play the guitar.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a very short story about a fox and a lighthouse.",
]


def trace(llm: LLM, conversations: list, params: SamplingParams) -> list[RequestOutput]:
    """The same as llm.chat, step by step: a line for each step, from the scheduler's output alone."""
    for name, prompt in zip("ABCDEFGH", llm.preprocess_chat(conversations), strict=False):
        llm.add_request(name, prompt, params)
    finished = {}
    while llm.has_unfinished_requests():
        done = {output.request_id: output for output in llm.step() if output.finished}
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
    parser.add_argument("--trace", action="store_true", help="print one line per step")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    llm = LLM(args.model, max_model_len=2048)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = trace(llm, conversations, params) if args.trace else llm.chat(conversations, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        completion = output.outputs[0]
        print(f"\n> {question}\n{completion.text.strip()}")
        print(f"  [{len(completion.token_ids)} tokens, {completion.finish_reason}]")


if __name__ == "__main__":
    main()
