"""Checkpoints: whole ones load exactly once, others are refused with the file and the tensor named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save_model
from transformers import LlamaConfig, MistralConfig, Qwen2Config

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


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


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
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ValueError, match=missing.name):
        load(tmp_path)


@pytest.mark.parametrize(
    "change,names",
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), ["missing", "model.layers.1.mlp.up_proj.weight"]),
        (lambda w: w.update(extra=torch.zeros(1)), ["unexpected", "extra"]),
        (lambda w: w.update({"model.norm.weight": torch.zeros(63)}), ["model.norm.weight", "(63,)", "(64,)"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(copy, change, names):
    edit_weights(copy, change)
    with pytest.raises(ValueError) as error:
        load(copy)
    assert all(name in str(error.value) for name in names), error.value


def test_known_leftovers_in_a_checkpoint_are_ignored(copy):
    edit_weights(copy, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(copy)


def test_truncated_or_missing_weights_are_refused(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        load(copy)
    weights.rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match="model.safetensors is missing.*never pickle"):
        load(copy)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json is missing"):
        LLM(str(tmp_path))


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no/such-model"):
        LLM("no/such-model")
    with pytest.raises(ValueError, match="not a folder"):
        LLM("/no/such/folder")


def test_a_folder_without_a_tokenizer_is_refused(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(str(copy))


@pytest.mark.parametrize(
    "changes,names",
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["none given", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["spiral"]),
    ],
)
def test_an_unsupported_config_is_refused_by_name(copy, changes, names):
    edit_config(copy, **changes)
    with pytest.raises(ValueError) as error:
        LLM(str(copy), num_gpu_blocks_override=64)
    assert all(name in str(error.value) for name in names), error.value


def test_other_architectures_and_sliding_windows_are_refused(tmp_path):
    sizes = CONFIGS["qwen2"]().to_dict()
    for config in (
        MistralConfig(hidden_size=64, num_hidden_layers=1, architectures=["MistralForCausalLM"]),
        Qwen2Config(**sizes | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=None)),
    ):
        config.architectures = config.architectures or ["Qwen2ForCausalLM"]
        config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="Mistral|sliding_attention"):
            load_config(tmp_path)


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
