"""On a CPU every linear is packed for oneDNN once, and says the same; without oneDNN the plain path runs."""

import pytest
import torch
from torch import nn

from nanoserve import LLM, SamplingParams
from nanoserve.model import PackedLinear

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_says_what_the_plain_one_does(rows, bias):
    torch.manual_seed(rows)
    plain, x = nn.Linear(96, 40, bias=bias), torch.randn(rows, 96)
    with torch.inference_mode():
        packed = PackedLinear(plain.weight, plain.bias)
        assert (packed(x) - plain(x)).abs().max() < 1e-5
        assert torch.equal(packed(x), packed(x))


def test_every_linear_is_packed_and_its_plain_weight_given_up(tiny_model):
    model = LLM(tiny_model[0], num_gpu_blocks_override=64).runner.model
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(PackedLinear) == 4 * len(model.model.layers) + 1
    assert not any(issubclass(kind, nn.Linear) for kind in kinds)
    names = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    assert all("norm" in name or name == "model.embed_tokens.weight" for name in names)


def test_without_onednn_or_in_bfloat16_the_plain_path_runs(llama, monkeypatch):
    packed = LLM(llama[0], num_gpu_blocks_override=64).generate([5, 6, 7], PARAMS, use_tqdm=False)
    half = LLM(llama[0], num_gpu_blocks_override=64, dtype="bfloat16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = LLM(llama[0], num_gpu_blocks_override=64)
    for llm in (half, plain):
        assert not any(isinstance(module, PackedLinear) for module in llm.runner.model.modules())
    assert plain.generate([5, 6, 7], PARAMS, use_tqdm=False)[0].outputs == packed[0].outputs
