"""From a checkpoint to a model: safetensors to parameters, each exactly once.
This module decides where a checkpoint lies and whether it is whole, which is checked before any memory is taken. Pickle
files are never opened and no code of a checkpoint is run."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from nanoserve.attention import Attend
from nanoserve.demo_model import demo_model_path
from nanoserve.model import CausalLM, check_supported, compute_rope_table
from nanoserve.request import blame, require, require_number

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# What config.json must say, or transformers would make it up, and the largest value that is no damage.
_SIZES = {"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_hidden_layers": 1 << 9,
          "num_attention_heads": 1 << 16, "vocab_size": 1 << 24, "max_position_embeddings": 1 << 30}  # fmt: skip


def find_model(model: str) -> Path:
    """The folder of a model given as a folder, a hub id, or "demo". Raises ValueError if there is none."""
    folder = Path(demo_model_path() if model == "demo" else model)
    if model and folder.is_dir():
        return folder
    with blame(f"model {model!r} is not a folder, and the hub did not give it"):
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))


def load_config(folder: Path) -> Any:
    """The folder's transformers config. Raises ValueError naming what in it is missing, unreadable or not supported."""
    path = folder / "config.json"
    with blame(f"{path} cannot be used"):
        written = json.loads(path.read_bytes())
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_supported(config)
        for name, high in _SIZES.items():
            require_number(name, written.get(name), True, 1, high)
        require_number("rms_norm_eps", written.get("rms_norm_eps"), False, 0, 1)
        with blame("rope_parameters"):
            compute_rope_table(config, 1, torch.device("cpu"))
        return config


def load_tokenizer(folder: Path, config: Any) -> tuple[Any, set[int]]:
    """The folder's tokenizer, and the ids that end an output: its own, and those of generation_config.json."""
    with blame(f"the tokenizer in {folder} (tokenizer.json, tokenizer_config.json) cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    path = folder / "generation_config.json"
    with blame(f"{path} cannot be used"):
        ids = (GenerationConfig.from_pretrained(folder) if path.is_file() else config).eos_token_id
        ids = ids if isinstance(ids, list) else [ids]
        require(all(isinstance(each, int | None) for each in ids), "eos_token_id", "a token id or a list of them", ids)
        return tokenizer, {tokenizer.eos_token_id, *ids} - {None}


def load_model(folder: Path, config: Any, attend: Attend, max_model_len: int, dtype: torch.dtype, device: torch.device,
               dummy: bool) -> CausalLM:
    """The model on `device`, with its or random weights. Raises ValueError naming the file and tensor at fault."""
    with torch.device("meta"):  # no memory until the files are known to be whole
        model = CausalLM(config, attend).to(dtype)
    files = {} if dummy else _open_weights(folder, dict(model.checkpoint_tensors()))
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    generator = torch.Generator(device).manual_seed(0)
    for name, target in model.checkpoint_tensors():
        target.data.normal_(0, 0.02, generator=generator) if dummy else target.data.copy_(files[name].get_tensor(name))
    model.rope_table = compute_rope_table(config, max_model_len, device)
    return model.eval().requires_grad_(False)


def _open_weights(folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tensor name -> the open file that holds it, once the headers say that all are there and no others."""
    index, paths = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
    if index.is_file():
        with blame(f"weight_map in {index} cannot be used"):
            paths = sorted({folder / shard for shard in json.loads(index.read_bytes())["weight_map"].values()})
    files: dict[str, Any] = {}
    for path in paths:
        with blame(f"weight file {path} cannot be read (only safetensors are, never pickle)"):
            file = safe_open(path, framework="pt")
        for name in file.keys():
            require(name not in files, f"tensor {name}", "in one weight file", f"a second one, {path}")
            files[name] = file
            if name in wanted:
                tensor, header, shape = f"tensor {name} in {path}", file.get_slice(name), list(wanted[name].shape)
                require(header.get_shape() == shape, tensor, f"of shape {shape}", header.get_shape())
                require(header.get_dtype() in ("F64", "F32", "F16", "BF16"), tensor, "of floats", header.get_dtype())
    # Tied weights may be there twice, and old checkpoints hold a part of the rope table.
    unused = {name for name in files if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    missing, unexpected = sorted(wanted.keys() - files)[:5], sorted(files.keys() - wanted - unused)[:5]
    if missing or unexpected:
        raise ValueError(f"the weights in {folder} do not fit config.json: {missing = }, {unexpected = }")
    return files
