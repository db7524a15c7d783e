"""Checkpoints: every parameter is loaded, each exactly once. What is refused is in test_bad_models.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save_model
from transformers import LlamaConfig

from nanoserve import LLM, SamplingParams
from nanoserve.attention import attend_torch
from nanoserve.loader import load_config, load_model
from nanoserve.model import compute_rope_table, get_head_dim

CPU = torch.device("cpu")


def load(folder):
    folder = Path(folder)
    return load_model(folder, load_config(folder), attend_torch, 64, torch.float32, CPU, dummy=False)


@pytest.fixture
def copy(llama, tmp_path):
    """A model folder a test may damage."""
    folder = tmp_path / "model"
    shutil.copytree(llama[0], folder)
    return folder


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_every_parameter_is_the_checkpoints(tiny_model):
    folder, model = tiny_model
    ours = dict(load(folder).checkpoint_tensors())
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sharded_weights_load(tmp_path):
    model = save_model(CONFIGS["qwen3"](), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(load(tmp_path).model.layers[2].mlp.down_proj.weight, model.model.layers[2].mlp.down_proj.weight)


def test_known_leftovers_in_a_checkpoint_are_ignored(copy):
    edit_weights(copy, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(copy)


def test_a_tied_output_may_be_in_the_checkpoint_too(tmp_path):
    model = save_model(CONFIGS["llama-tied-bias"](), tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no/such-model"):
        LLM("no/such-model")
    with pytest.raises(ValueError, match="not a folder"):
        LLM("/no/such/folder")


ROPES = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "longrope": dict(factor=4.0, short_factor=[1.1] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=32),
}


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_tables_are_transformers(rope_type, spelling, tmp_path):
    """Both spellings of the config; compared at a length of 128, past what the scaled types were trained on."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = CONFIGS["llama"]().to_dict() | dict(head_dim=16, max_position_embeddings=64)
    config.pop("rope_parameters")
    rope = dict(rope_type=rope_type, **ROPES[rope_type])
    if spelling == "rope_parameters":
        config["rope_parameters"] = rope | {"rope_theta": 5000.0}
    else:
        config |= {"rope_theta": 5000.0, "rope_scaling": rope if rope_type != "default" else None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    config = load_config(tmp_path)
    table = compute_rope_table(config, 128, CPU)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(128)[None])
    sign = torch.tensor([-1.0] * 8 + [1.0] * 8)  # of what the swapped halves are multiplied by
    assert (table[:, 0] - cos[0]).abs().max() < 1e-5 and (table[:, 1] - sin[0] * sign).abs().max() < 1e-5
    assert get_head_dim(config) == 16


def test_partial_rotary_is_refused():
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5),
    )
    with pytest.raises(ValueError, match="16 of a head, got 8"):
        compute_rope_table(config, 16, CPU)


def test_dummy_weights_need_only_a_config_and_a_tokenizer(copy):
    (copy / "model.safetensors").unlink()
    llm = LLM(str(copy), load_format="dummy", num_gpu_blocks_override=64)
    (output,) = llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_dtypes(llama):
    assert LLM(llama[0], num_gpu_blocks_override=64).runner.dtype is torch.float32
    llm = LLM(llama[0], num_gpu_blocks_override=64, dtype=torch.bfloat16)
    assert llm.runner.kv_caches[0].dtype is llm.runner.model.lm_head.weight.dtype is torch.bfloat16
    (output,) = llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
