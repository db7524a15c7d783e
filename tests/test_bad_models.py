"""Broken and hostile model folders: refused in seconds, by file and field, with nothing allocated and nothing run.

Every folder here is a small Llama's with one thing changed. `refused` also checks what an error message cannot show:
that no weights were allocated, no network was asked, and no code or pickle of the folder ran.
"""

import json
import pickle
import shutil
import socket
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save_model
from transformers import MistralConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from nanoserve import LLM, SamplingParams
from nanoserve.attention import attend_torch
from nanoserve.loader import find_model, load_config, load_model

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
NORM, LINEAR = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def copy(llama, tmp_path, monkeypatch):
    """A folder a test may damage, on a machine without a network."""
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("asked the network"))
    return shutil.copytree(llama[0], tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    save_model(CONFIGS["llama"](), folder, max_shard_size="100KB")
    assert len(shards(folder)) > 2
    return folder


@pytest.fixture
def marker(tmp_path):
    """What code of the folder writes if it ever runs."""
    return tmp_path / "code_of_the_model_ran"


def load(folder):
    return load_model(folder, load_config(folder), attend_torch, 64, torch.float32, CPU, dummy=False)


def refused(folder, *names, **options):
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to_empty", lambda *args, **more: pytest.fail("allocated the model"))
        with pytest.raises(ValueError) as error:
            LLM(str(folder), num_gpu_blocks_override=64, **options)
    assert time.monotonic() - begin < 10
    for name in (str(folder), *names):
        assert name in str(error.value), error.value


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def edit_json(path, **changes):
    """Change or, with None, drop fields of a JSON file."""
    fields = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_weights(path, **changes):
    """Change or, with None, drop tensors of a safetensors file."""
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


# Configs


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"null"], ids=repr)
def test_a_config_that_is_no_json_object_is_refused(copy, text):
    (copy / "config.json").write_bytes(text)
    refused(copy, "config.json")


def test_a_folder_without_a_config_is_refused(copy, tmp_path):
    (copy / "config.json").unlink()
    refused(copy, "config.json", "No such file")


FIELDS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
FIELDS += ["max_position_embeddings", "rms_norm_eps", "model_type"]


@pytest.mark.parametrize("field", [*FIELDS, "architectures"])
def test_a_config_without_a_field_is_refused(copy, field):
    """transformers would put the sizes of some other model there."""
    edit_json(copy / "config.json", **{field: None})
    refused(copy, "config.json", field.removesuffix("s") if field == "architectures" else field)


@pytest.mark.parametrize("value", ["64", [64], 0, -64, 2.5], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_is_no_size_is_refused(copy, field, value):
    edit_json(copy / "config.json", **{field: value})
    refused(copy, "config.json", field)


SOMETHING_ELSE = {
    "Mixtral": (MixtralConfig(architectures=["MixtralForCausalLM"]).to_dict(), ["MixtralForCausalLM"]),
    "Qwen3-MoE": (Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]).to_dict(), ["Qwen3MoeForCausalLM"]),
    "Mistral": (MistralConfig(architectures=["MistralForCausalLM"]).to_dict(), ["MistralForCausalLM"]),
    "sliding window": (
        Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1).to_dict()
        | dict(architectures=["Qwen2ForCausalLM"]),
        ["layer_types", "sliding_attention"],
    ),
    "unknown architecture": (dict(architectures=["FooForCausalLM"]), ["FooForCausalLM", "LlamaForCausalLM"]),
    "unknown model_type": (dict(model_type="foo"), ["foo"]),
    "activation": (dict(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "heads": (dict(num_key_value_heads=3), ["num_key_value_heads", "3"]),
    "no K/V heads": (dict(num_key_value_heads=0), ["num_key_value_heads", "0"]),
    "negative K/V heads": (dict(num_key_value_heads=-2), ["num_key_value_heads", "-2"]),
    "odd head_dim": (dict(head_dim=15), ["head", "15"]),
    "negative head_dim": (dict(head_dim=-16), []),
    "quantized": (dict(quantization_config=dict(quant_method="gptq", bits=4)), ["quantization_config", "gptq"]),
    "rope type": (dict(rope_parameters=dict(rope_type="spiral", rope_theta=1e4)), ["rope_type", "spiral"]),
    "rope without a factor": (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4)), ["rope", "factor"]),
    "rope with a bad factor": (
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor="x")),
        ["rope_parameters"],
    ),
    "rope that is no dict": (dict(rope_parameters=[1]), []),
    "partial rotary": (
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5)),
        ["rope_parameters", "16 of a head, got 8"],
    ),
}


@pytest.mark.parametrize("case", SOMETHING_ELSE)
def test_a_config_of_something_else_is_refused(copy, case):
    changes, names = SOMETHING_ELSE[case]
    edit_json(copy / "config.json", **changes)
    refused(copy, "config.json", *names)
    refused(copy, "config.json", *names, load_format="dummy")


@pytest.mark.parametrize(
    "changes,names",
    [
        (dict(hidden_size=65536), ["model.safetensors", "65536"]),
        (dict(hidden_size=65536, intermediate_size=1 << 20, vocab_size=1 << 20), ["model.safetensors", "65536"]),
        (dict(num_hidden_layers=500), ["missing", "model.layers.10."]),
        (dict(num_hidden_layers=10**6), ["config.json", "num_hidden_layers", "1000000"]),
        (dict(hidden_size=1 << 40), ["config.json", "hidden_size"]),
        (dict(vocab_size=10**30), ["config.json", "vocab_size"]),
        (dict(max_position_embeddings=10**15), ["config.json", "max_position_embeddings"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else " ".join(value),
)
def test_a_config_that_claims_a_huge_model_takes_no_memory(copy, changes, names):
    edit_json(copy / "config.json", **changes)
    refused(copy, *names)


# Weights


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1000, -1], ids=str)
def test_truncated_weights_are_refused(copy, size):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(copy, "model.safetensors", "cannot be read")


@pytest.mark.parametrize("place", [0, 7, 8, 20], ids=str)
def test_a_corrupted_header_is_refused(copy, place):
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    refused(copy, "model.safetensors", "cannot be read")


def test_weights_that_are_a_directory_are_refused(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").mkdir()
    refused(copy, "model.safetensors", "cannot be read")


@pytest.mark.parametrize(
    "name,tensor,names",
    [
        (LINEAR, None, ["missing", LINEAR]),
        ("lm_head.weight", None, ["missing", "lm_head.weight"]),
        ("extra", torch.zeros(1), ["unexpected", "extra"]),
        ("model.layers.3.mlp.up_proj.weight", torch.zeros(112, 64), ["unexpected", "layers.3.mlp.up_proj.weight"]),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), ["unexpected", "q_proj.bias"]),
        (NORM, torch.zeros(63), ["model.safetensors", NORM, "[64]", "[63]"]),
        (NORM, torch.zeros(1, 64), ["model.safetensors", NORM, "[64]", "[1, 64]"]),
        (NORM, torch.tensor(1.0), ["model.safetensors", NORM, "[64]", "[]"]),
        (LINEAR, torch.zeros(64, 112), ["model.safetensors", LINEAR, "[112, 64]", "[64, 112]"]),
        (NORM, torch.ones(64, dtype=torch.int32), ["model.safetensors", NORM, "I32"]),
        (NORM, torch.ones(64, dtype=torch.bool), ["model.safetensors", NORM, "BOOL"]),
        (NORM, torch.ones(64, dtype=torch.complex64), ["model.safetensors", NORM, "C64"]),
        (NORM, torch.ones(64).to(torch.float8_e4m3fn), ["model.safetensors", NORM, "F8_E4M3"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_tensors_that_are_not_the_configs_are_refused(copy, name, tensor, names):
    edit_weights(copy / "model.safetensors", **{name: tensor})
    refused(copy, *names)


def test_embeddings_for_another_vocabulary_are_refused(copy):
    edit_json(copy / "config.json", vocab_size=300)
    refused(copy, "model.safetensors", "[300, 64]", "[288, 64]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_floats_of_any_size_load_and_so_does_nan(copy, dtype):
    tensor = torch.full((64,), 1.5, dtype=dtype)
    tensor[3] = torch.nan
    edit_weights(copy / "model.safetensors", **{NORM: tensor})
    weight = load(copy).model.norm.weight
    assert weight.dtype == torch.float32 and torch.equal(weight.nan_to_num(0), tensor.float().nan_to_num(0))


# Shards


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", '{"weight_map": ["model.safetensors"]}', '{"weight_map": {"a": 3}}', '{"weight_map": null}'],
    ids=repr,
)
def test_an_index_that_is_no_index_is_refused(copy, index):
    (copy / "model.safetensors.index.json").write_text(index)
    refused(copy, "model.safetensors.index.json", "weight_map")


def test_an_empty_index_means_that_everything_is_missing(copy):
    edit_json(copy / "model.safetensors.index.json", weight_map={})
    refused(copy, "missing", "lm_head.weight")


def test_a_missing_shard_is_named(sharded):
    shards(sharded)[1].unlink()
    refused(sharded, "model-00002-of-", "No such file")


def test_a_truncated_shard_is_named(sharded):
    path = shards(sharded)[1]
    path.write_bytes(path.read_bytes()[:-10])
    refused(sharded, path.name, "cannot be read")


def test_a_wrong_tensor_is_named_with_its_shard(sharded):
    path = next(path for path in shards(sharded) if NORM in load_file(path))
    edit_weights(path, **{NORM: torch.zeros(63)})
    refused(sharded, path.name, NORM)


def test_a_shard_that_the_index_forgets_is_missing(sharded):
    path, index = shards(sharded)[1], sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={name: shard for name, shard in weight_map.items() if shard != path.name})
    refused(sharded, "missing", sorted(load_file(path))[0])


def test_a_tensor_in_two_shards_is_refused(sharded):
    first, second = shards(sharded)[:2]
    name, tensor = next(iter(load_file(first).items()))
    edit_weights(second, **{name: tensor})
    refused(sharded, name, "in one weight file", second.name)


def test_a_shard_listed_twice_is_read_once(sharded):
    expected, index = load(sharded), sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {f"{name}.again": f"./{shard}" for name, shard in weight_map.items()})
    for (name, mine), (_, theirs) in zip(
        load(sharded).checkpoint_tensors(), expected.checkpoint_tensors(), strict=True
    ):
        assert torch.equal(mine, theirs), name


# Tokenizers and generation configs


def test_a_folder_without_a_tokenizer_is_refused(copy):
    for path in [*copy.glob("tokenizer*"), copy / "chat_template.jinja"]:
        path.unlink()
    refused(copy, "tokenizer.json")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"a"'], ids=repr)
def test_a_broken_tokenizer_is_refused(copy, file, text):
    (copy / file).write_text(text)
    refused(copy, file)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[1]]}'], ids=repr)
def test_a_broken_generation_config_is_refused(copy, text):
    (copy / "generation_config.json").write_text(text)
    refused(copy, "generation_config.json", "eos_token_id" if "eos" in text else "")


@pytest.mark.parametrize("template", [None, "{% for", "{{ messages.nothing.nowhere }}"], ids=str)
def test_a_tokenizer_without_a_chat_template_completes_but_does_not_chat(copy, template):
    (copy / "chat_template.jinja").unlink()
    if template:
        (copy / "chat_template.jinja").write_text(template)
    llm = LLM(str(copy), num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match="chat.template"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_it_matters(copy):
    """Many published models have such a tokenizer, so the folder loads, and the prompts are checked."""
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | dict(id=5000, content="<new>"))
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = LLM(str(copy), num_gpu_blocks_override=64)
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
    new_id = len(llm.tokenizer) - 1
    with pytest.raises(ValueError, match=rf"token ids must be in \[0, 288\), got \[{new_id}\]"):
        llm.generate("hello <new>", GREEDY, use_tqdm=False)


# Code and pickles


def write_code(folder, marker):
    """A module that writes the marker when it is imported, with every class an auto_map could ask for."""
    code = f"import transformers\nopen({str(marker)!r}, 'w').close()\n"
    code += "class Config(transformers.LlamaConfig): pass\nclass Model(transformers.LlamaForCausalLM): pass\n"
    code += "class Tokenizer(transformers.PreTrainedTokenizerFast): pass\n"
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    exec(compile(code, "evil.py", "exec"), {})  # the trap works
    marker.unlink()


AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoModel": "evil.Model",
            "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}  # fmt: skip


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_custom_code_beside_a_known_model_is_not_run(copy, marker, file):
    write_code(copy, marker)
    edit_json(copy / file, auto_map=AUTO_MAP)
    (output,) = LLM(str(copy), num_gpu_blocks_override=64).generate("hello", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4 and not marker.exists()


@pytest.mark.parametrize(
    "file,changes",
    [
        ("config.json", dict(model_type="evil")),
        ("config.json", dict(model_type=None)),
        ("tokenizer_config.json", dict(tokenizer_class="Tokenizer")),
        ("tokenizer_config.json", dict(tokenizer_class="evil.Tokenizer", auto_map={"AutoTokenizer": "evil.Tokenizer"})),
    ],
)
def test_a_model_that_is_its_own_code_is_refused(copy, marker, file, changes):
    write_code(copy, marker)
    edit_json(copy / file, **dict(auto_map=AUTO_MAP) | changes)
    refused(copy, file)
    assert not marker.exists()


def test_there_is_no_option_that_trusts_code(copy):
    with pytest.raises(ValueError, match=r"options must be among .*, got \['trust_remote_code'\]"):
        LLM(str(copy), trust_remote_code=True)


def test_a_chat_template_is_no_way_to_run_code(copy, marker):
    reach = "cycler.__init__.__globals__.__builtins__"
    (copy / "chat_template.jinja").write_text(f"{{{{ {reach}.open({str(marker)!r}, 'w') }}}}")
    llm = LLM(str(copy), num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match="chat template.*unsafe"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert not marker.exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def trap(marker):
    """A pickle that writes the marker when it is opened."""
    content = pickle.dumps(Trap(marker))
    pickle.loads(content).close()  # the trap works
    marker.unlink()
    return content


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth"])
def test_pickled_weights_are_not_opened(copy, marker, trap, name):
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(trap)
    refused(copy, "model.safetensors", "never pickle")
    assert not marker.exists()


def test_an_index_that_points_to_a_pickle_opens_none(copy, marker, trap):
    (copy / "pytorch_model.bin").write_bytes(trap)
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        edit_json(copy / name, weight_map={NORM: "pytorch_model.bin"})
    refused(copy, "pytorch_model.bin", "never pickle")
    assert not marker.exists()


def test_a_pickle_in_place_of_a_tokenizer_is_not_opened(copy, marker, trap):
    for name in ("tokenizer.json", "tokenizer.model", "vocab.pkl"):
        (copy / name).write_bytes(trap)
    refused(copy, "tokenizer")
    assert not marker.exists()


def test_neither_code_nor_pickles_are_downloaded(monkeypatch, tmp_path):
    from fnmatch import fnmatch

    asked = {}
    monkeypatch.setattr("nanoserve.loader.snapshot_download", lambda name, **more: asked.update(more) or str(tmp_path))
    assert find_model("someone/some-model") == tmp_path
    files = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "chat_template.jinja"]
    files += ["vocab.json", "merges.txt", "tokenizer.model", "pytorch_model.bin", "model.pth", "evil.py", "model.gguf"]
    chosen = [file for file in files if any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])]
    assert chosen == files[:7]
