"""From a checkpoint to a model: safetensors to parameters, each exactly once.

This module decides where a checkpoint lies and whether it is whole. Headers are compared with the model before any
memory is taken; the model is built on the meta device, so its weights are allocated once. Pickle files are never opened
and no code of a checkpoint is run.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from nanoserve.attention import Attend
from nanoserve.model import CausalLM, check_supported, compute_rope_table
from nanoserve.request import blame

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def find_model(model: str) -> Path:
    """The folder of a model given as a folder, a hub id, or "demo". Raises ValueError if there is none."""
    if model == "demo":
        from nanoserve.demo_model import demo_model_path

        return Path(demo_model_path())
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    with blame(f"model {model!r} is not a folder, and the hub did not give it"):
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))


def load_config(folder: Path) -> Any:
    """The folder's transformers config. Raises ValueError if it is missing, unreadable or not supported."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'} is missing: not a Hugging Face model folder")
    with blame(f"{folder / 'config.json'} cannot be used"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_supported(config)
        return config


def load_tokenizer(folder: Path, config: Any) -> tuple[Any, set[int]]:
    """The folder's tokenizer, and the ids that end an output: its own, and those of generation_config.json."""
    from transformers import AutoTokenizer, GenerationConfig

    with blame(f"the tokenizer in {folder} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    has_file = (folder / "generation_config.json").is_file()
    more = (GenerationConfig.from_pretrained(folder) if has_file else config).eos_token_id
    return tokenizer, {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}


def load_model(folder: Path, config: Any, attend: Attend, max_model_len: int, dtype: torch.dtype, device: torch.device,
               dummy: bool) -> CausalLM:
    """The model on `device`, with its or random weights. Raises ValueError naming the file and tensor at fault."""
    with torch.device("meta"):
        model = CausalLM(config, attend).to(dtype)
    with ExitStack() as stack:
        files = {} if dummy else _open_shards(folder, stack)
        if not dummy:
            _check_tensors(dict(model.checkpoint_tensors()), files, config.tie_word_embeddings)
        model.to_empty(device=device)
        model.tie_weights()
        generator = torch.Generator(device).manual_seed(0)
        for name, target in model.checkpoint_tensors():
            if dummy:
                target.data.normal_(0, 0.02, generator=generator)
            else:
                target.data.copy_(files[name].get_tensor(name))
    model.rope_table = compute_rope_table(config, max_model_len, device)
    return model.eval().requires_grad_(False)


def _open_shards(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else {"": "model.safetensors"}
    files: dict[str, Any] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ValueError(f"weight file {folder / shard} is missing; only safetensors files are read, never pickle")
        with blame(f"weight file {folder / shard} cannot be read"):
            file = stack.enter_context(safe_open(folder / shard, framework="pt"))
        names = set(file.keys())
        if twice := sorted(names & files.keys()):
            raise ValueError(f"tensor {twice[0]} lies in two weight files of {folder}")
        files |= dict.fromkeys(names, file)
    return files


def _check_tensors(wanted: dict[str, torch.Tensor], files: dict[str, Any], tied: bool) -> None:
    ignored = {name for name in files if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")}
    missing, unexpected = sorted(wanted.keys() - files), sorted(files.keys() - wanted - ignored)
    if missing or unexpected:
        raise ValueError(f"the weights do not fit the config: missing {missing[:5]}, unexpected {unexpected[:5]}")
    for name, tensor in wanted.items():
        shape = tuple(files[name].get_slice(name).get_shape())
        if shape != tuple(tensor.shape):
            raise ValueError(f"tensor {name} has shape {shape}, the config asks for {tuple(tensor.shape)}")
