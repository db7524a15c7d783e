"""example.py's step-through page: what it records against the engine, and the page itself in headless Chromium."""

import html
import json
import re
import shutil
import subprocess

import pytest
from helpers_scheduler import check_scheduler

import example
from nanoserve import LLM, SamplingParams

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = {**example.PAGE_OPTIONS, "num_gpu_blocks_override": 44, "max_num_batched_tokens": 24}
NASTY = "</script><script>document.title = 'broken'</script><b>&amp;</b>\u2028 TRACE_DATA"  # in a prompt


class Checked(example.Recording):
    """Compares each step with the engine while its state is there to be read."""

    def step(self):
        outputs = super().step()
        check_scheduler(self.llm.scheduler)
        step, scheduler, manager = self.steps[-1], self.llm.scheduler, self.llm.block_manager
        told = json.loads(json.dumps(step))
        assert (told["running"], told["waiting"]) == ([*map(_id, scheduler.running)], [*map(_id, scheduler.waiting)])
        owners = [sum(block in table for table in told["tables"].values()) for block in range(manager.num_blocks)]
        assert owners == manager._ref_counts
        assert set(told["free"]) == {block for block, count in enumerate(owners) if count == 0}
        assert set(told["cached"]) == {b for b in told["free"] if any(b in same for same in manager._cached.values())}
        for name, request in scheduler.requests.items():
            assert told["progress"][name] == [request.num_computed_tokens, request.num_tokens]
            assert told["tables"].get(name, []) == manager.block_table(name)
        for output in outputs:
            assert told["texts"][output.request_id] == output.outputs[0].text
        return outputs


def _id(request):
    return request.request_id


@pytest.fixture(scope="module")
def recording(llama):
    """A run with everything in it, on a tiny random model: chunks, hits, sharing, preemption, ends of both kinds."""
    llm = LLM(llama[0], **OPTIONS)
    texts = ["one two three", "hello world, how are you", "one two three four", NASTY, "one two three five"]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    limits = [{"max_tokens": 40}, {"max_tokens": 9}, {"max_tokens": 30}, {"max_tokens": 12}, {"max_tokens": 5}]
    limits[4]["stop_token_ids"] = range(288)  # so that its first token ends it, whichever that is
    params = [SamplingParams(temperature=0, ignore_eos=True, **limit) for limit in limits]
    recording = Checked(llm, texts)
    recording.outputs = example.trace(llm, conversations, params, [0, 0, 3, 6, 9], recording)
    recording.metrics = llm.get_metrics()
    return recording


def read_data(page):
    scripts = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    assert len(scripts) == 1
    return json.loads(scripts[0])


def test_steps_add_up(recording):
    data, computed = read_data(recording.page()), {}
    size, kinds = data["block_size"], set()
    assert [data["num_blocks"], data["max_num_batched_tokens"], data["max_num_seqs"]] == [44, 24, 3]
    for step in data["steps"]:
        assert sum(num_tokens for _, _, num_tokens, _, _ in step["shares"]) <= data["max_num_batched_tokens"]
        assert len(step["running"]) <= data["max_num_seqs"]
        events = {(kind, name): more for kind, name, *more in step["events"]}
        computed |= {name: 0 for kind, name in events if kind == "preempted"}
        for name, start, num_tokens, kind, block_ids in step["shares"]:
            joined = events.get(("admitted", name)) or events.get(("resumed", name))
            assert start == (joined[0] if joined else computed[name]), "a share starts where the one before it ended"
            assert len(block_ids) * size >= start + num_tokens
            assert (start + num_tokens <= data["requests"][name]["num_prompt_tokens"]) or kind != "prefill"
            computed[name], kinds = start + num_tokens, kinds | {kind}
            if ("finished", name) not in events:
                assert step["tables"][name] == block_ids and step["progress"][name][0] == computed[name]
    assert kinds == {"prefill", "recompute", "decode"}


def test_events_are_what_the_engine_counted(recording):
    data = read_data(recording.page())
    events = [event for step in data["steps"] for event in step["events"]]
    by_kind = {kind: [event[1:] for event in events if event[0] == kind] for kind, *_ in events}
    assert sorted(name for name, _ in by_kind["admitted"]) == [*data["requests"]] == [*"ABCDE"]
    assert sum(num_cached for _, num_cached in by_kind["admitted"]) == recording.metrics["prefix_cache_hits"] > 0
    assert len(by_kind["preempted"]) == len(by_kind["resumed"]) == recording.metrics["num_preemptions"] > 0
    for output in recording.outputs:
        end = output.outputs[0]
        assert [output.request_id, end.finish_reason, end.stop_reason] in by_kind["finished"]
        assert dict(by_kind["admitted"])[output.request_id] == output.num_cached_tokens
        assert len(data["requests"][output.request_id]["tokens"]) == len(output.prompt_token_ids) + len(end.token_ids)
        texts = [step["texts"].get(output.request_id) for step in data["steps"]]
        assert [text for text in texts if text is not None][-1] == end.text
    recomputed = sum(n for step in data["steps"] for _, _, n, kind, _ in step["shares"] if kind == "recompute")
    assert recomputed >= recording.metrics["recomputed_tokens"] > 0


def test_page_loads_nothing_and_no_text_breaks_it(recording):
    page = recording.page()
    assert page.count("</script>") == 2 and page.count("TRACE_DATA") == 1  # the one in the prompt
    assert "".join(about["question"] for about in read_data(page)["requests"].values()).count("broken") == 1
    without_data = page.replace(re.search(r'id="trace">(.*?)</script>', page, re.DOTALL)[1], "")
    for loader in ("http:", "https:", "//cdn", "src=", "<link", "@import", "url(", "fetch(", "import("):
        assert loader not in without_data


# A frame of the width of a phone, or of a desktop, in which keys are pressed; what it sees ends up in the dumped DOM.
HARNESS = """<!doctype html><meta charset="utf-8"><pre id="seen"></pre><script>
const page = PAGE, keys = KEYS, seen = { errors: [], shots: [], title: "" };
const frame = document.createElement("iframe");
frame.style = "width: WIDTHpx; height: 700px; border: 0";
document.body.append(frame);
frame.onload = () => {
  const inside = frame.contentWindow, doc = frame.contentDocument;
  const text = (id) => doc.getElementById(id).innerText;
  const shoot = (key) => seen.shots.push({
    key, where: text("where"), events: text("events"), budget: text("budget-text"), queues: text("queues"),
    texts: doc.getElementById("texts").textContent, table: text("table"), detail: text("detail"),
    sideways: doc.documentElement.scrollWidth - doc.documentElement.clientWidth,
    pool: [...doc.querySelectorAll("#pool .block")].map((block) => block.dataset.kind),
    rows: [...doc.querySelectorAll("#table .row .name b")].map((id) => Number(id.textContent)),
  });
  const press = (key) => {
    const [kind, what] = key.split(" "), target = what ? doc.querySelector(what) : doc.body;
    if (kind === "click") target.click();
    else target.dispatchEvent(new inside.KeyboardEvent("keydown", { key: kind, bubbles: true, cancelable: true }));
    shoot(key);
  };
  try { shoot(""); keys.forEach(press); } catch (error) { seen.errors.push(String(error)); }
  seen.title = doc.title;
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
window.report = (error) => seen.errors.push(error);
frame.srcdoc = page.replace("<head>", "<head><script>window.onerror = (e) => parent.report(String(e));<\\/script>");
</script>"""


def browse(folder, page, keys, width):
    script = HARNESS.replace("WIDTH", str(width)).replace("KEYS", json.dumps(keys))
    script = script.replace("PAGE", json.dumps(page).replace("<", "\\u003c"))
    (folder / "harness.html").write_text(script, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    address = (folder / "harness.html").as_uri()
    command = [CHROMIUM, *options, "--virtual-time-budget=20000", "--window-size=1400,900", "--dump-dom", address]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert seen["errors"] == [] and seen["title"] == "nanoserve, step by step"
    return seen["shots"]


def printed(text):  # a random model's text has characters that Python and JavaScript do not trim alike
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\ufeff]", "", text)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 1200])
def test_keys_step_through_the_page(recording, tmp_path, width):
    page = recording.page()
    steps, last = recording.steps, len(recording.steps) - 1
    keys = ["ArrowRight"] * last + ["ArrowRight", "ArrowLeft", "Home", "ArrowLeft", "End", "ArrowLeft #slider"]
    keys += ["Home", "ArrowRight", "click [data-choice=B]", "click [data-block='0']", "click #next"]
    shots = browse(tmp_path, page, keys, width)
    wanted = [*range(last + 1), last, last - 1, 0, 0, last, last - 1, 0, 1, 1, 1, 2]
    assert [shot["where"] for shot in shots] == [f"step {step} of {last}" for step in wanted]
    assert {shot["sideways"] for shot in shots} == {0}, "a line too wide for the page"
    texts = {}
    for shot, step in zip(shots, steps, strict=False):
        texts |= step["texts"]
        assert all(printed(text) in printed(shot["texts"]) for text in texts.values())
        held = [block for block, kind in enumerate(shot["pool"]) if kind in ("held", "shared")]
        assert held == sorted({block for table in step["tables"].values() for block in table})
        assert [block for block, kind in enumerate(shot["pool"]) if kind == "cached"] == sorted(step["cached"])
        shared = [b for b in held if sum(b in table for table in step["tables"].values()) > 1]
        assert [block for block, kind in enumerate(shot["pool"]) if kind == "shared"] == shared
        assert shot["rows"] == step["tables"].get("A", [])
        assert shot["budget"].startswith(f"{sum(share[2] for share in step['shares'])} of 24 tokens")
        for kind, name, *_ in step["events"]:
            assert re.search(rf"^{name} {kind}", shot["events"], re.MULTILINE)
        for progress in step["progress"].values():
            assert "{} / {}".format(*progress) in shot["queues"]
    assert shots[-1]["rows"] == steps[2]["tables"]["B"] and "Block 0: " in shots[-1]["detail"]
    assert "<b>&amp;</b>" in shots[last]["texts"], "markup in a prompt is shown as it is written"
