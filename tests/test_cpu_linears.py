"""On a CPU every linear is packed for oneDNN once, and says the same; without oneDNN the plain path runs."""

import pytest
import torch
from torch import nn

from nanoserve import LLM, SamplingParams
from nanoserve.model import Linear

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_says_what_the_plain_one_does(rows, bias):
    torch.manual_seed(rows)
    plain, packed, x = nn.Linear(96, 40, bias=bias), Linear(96, {"a": 30, "b": 10}, bias), torch.randn(rows, 96)
    packed.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        packed.pack()
        assert (packed(x) - plain(x)).abs().max() < 1e-5
        assert torch.equal(packed(x), packed(x))


def test_every_linear_is_packed_and_its_plain_weight_given_up(tiny_model):
    model = LLM(tiny_model[0], num_gpu_blocks_override=64).runner.model
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 4 * len(model.model.layers) + 1
    assert all(linear.packed is not None and linear.weight is None for linear in linears)
    names = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    assert all("norm" in name or name == "model.embed_tokens.weight" for name in names)


def test_without_onednn_or_in_bfloat16_the_plain_path_runs(llama, monkeypatch):
    packed = LLM(llama[0], num_gpu_blocks_override=64).generate([5, 6, 7], PARAMS, use_tqdm=False)
    half = LLM(llama[0], num_gpu_blocks_override=64, dtype="bfloat16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = LLM(llama[0], num_gpu_blocks_override=64)
    for llm in (half, plain):
        assert all(module.packed is None for module in llm.runner.model.modules() if isinstance(module, Linear))
    assert plain.generate([5, 6, 7], PARAMS, use_tqdm=False)[0].outputs == packed[0].outputs
