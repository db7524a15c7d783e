"""Llama, Qwen2 and Qwen3 in one file, with Hugging Face's parameter names.

This module decides what a decoder computes: embedding, attention with rotary positions, a gated MLP, logits. It does
not know requests, schedules or blocks; K/V caches and AttentionMetadata are passed through to the attention call. A
step's tokens lie in one row, `[num_tokens, hidden_size]`, whichever requests they belong to (Yu et al. 2022, "Orca").
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.attention import Attend, AttentionMetadata, store_kv

# architecture -> does a config without attention_bias put biases on q, k, v?
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen2ForCausalLM": True, "Qwen3ForCausalLM": False}


def get_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_supported(config: Any) -> str:
    """The config's architecture. Raises ValueError naming whatever in the config this file does not compute."""
    architecture = (config.architectures or ["(none given)"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture} is not supported; these are: {', '.join(ARCHITECTURES)}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported, only 'silu'")
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed:
        raise ValueError(f"layer_types with {', '.join(sorted(windowed))} is not supported, only full attention")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    return architecture


def compute_rope_table(config: Any, max_model_len: int, device: torch.device) -> torch.Tensor:
    """cos and sin for every position, [max_model_len, 2, head_dim / 2] float32 (Su et al. 2021, "RoFormer").

    Frequencies come from transformers' own ROPE_INIT_FUNCTIONS. Types that depend on the length ("dynamic", "longrope")
    are computed once for max_model_len, since cached keys cannot be rotated anew. Raises ValueError for unknown types.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, head_dim = config.rope_parameters, get_head_dim(config)
    rope_type = rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim
        inv_freq, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
    elif rope_type in ROPE_INIT_FUNCTIONS:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config, device, seq_len=max_model_len)
    else:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"rope_type={rope_type!r} is not supported; these are: {known}")
    if len(inv_freq) != head_dim // 2:
        raise ValueError(f"rotary embedding over {2 * len(inv_freq)} of {head_dim} head dimensions is not supported")
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float, device=device), inv_freq.float())
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] by its tokens' angles, [num_tokens, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FusedLinear(nn.Linear):
    """Several of the checkpoint's linears over the same input as one matrix product; `parts` names and sizes them."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool):
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Any, attend: Attend):
        super().__init__()
        architecture = check_supported(config)
        self.attend, self.head_dim = attend, get_head_dim(config)
        kv_size = config.num_key_value_heads * self.head_dim
        parts = {"q_proj": config.num_attention_heads * self.head_dim, "k_proj": kv_size, "v_proj": kv_size}
        bias = getattr(config, "attention_bias", False)
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=bias or ARCHITECTURES[architecture])
        self.o_proj = nn.Linear(parts["q_proj"], config.hidden_size, bias=bias)
        has_norm = architecture == "Qwen3ForCausalLM"
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else nn.Identity()

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, ...], kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).split(list(self.qkv_proj.parts.values()), dim=-1)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in qkv)
        q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        store_kv(k, v, kv_cache, metadata.slot_mapping)
        return self.o_proj(self.attend(q, kv_cache, metadata).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        bias, size = getattr(config, "mlp_bias", False), config.intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, attend: Attend):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, ...], kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, kv_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: Any, attend: Attend):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, attend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """The whole model. Built on the meta device by the loader, which then fills each parameter once."""

    def __init__(self, config: Any, attend: Attend):
        super().__init__()
        self.model = Decoder(config, attend)
        tied = config.tie_word_embeddings  # then the embedding's rows are the output's too
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_table = torch.empty(0)  # set by the loader: it is computed, not loaded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of input_ids [num_tokens] at positions [num_tokens]."""
        x = self.model.embed_tokens(input_ids)
        rope = self.rope_table[positions].to(x.dtype).unsqueeze(1).unbind(2)
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x = layer(x, rope, kv_cache, metadata)
        return self.model.norm(x)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] for the hidden states of the rows that sample."""
        return F.linear(hidden_states, (self.lm_head or self.model.embed_tokens).weight)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor a checkpoint must bring, by Hugging Face's name, as a view of where it goes."""
        for prefix, module in self.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                if isinstance(module, FusedLinear):
                    parent = prefix.rpartition(".")[0]
                    pieces = parameter.split(list(module.parts.values()))
                    for name, piece in zip(module.parts, pieces, strict=True):
                        yield f"{parent}.{name}.{kind}", piece
                else:
                    yield f"{prefix}.{kind}", parameter
