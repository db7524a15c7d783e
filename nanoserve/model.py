"""Llama, Qwen2 and Qwen3 in one file, with Hugging Face's parameter names.
This module decides what a decoder computes. It does not know requests or blocks: caches and AttentionMetadata are only
passed on. A step's tokens lie in one row, [num_tokens, hidden_size], whosever they are (Yu et al. 2022, "Orca")."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.attention import Attend, AttentionMetadata, store_kv
from nanoserve.request import require

# architecture -> what it adds to Llama's attention: biases on q, k and v, or norms of q and k
ARCHITECTURES = {"LlamaForCausalLM": "", "Qwen2ForCausalLM": "bias", "Qwen3ForCausalLM": "norm"}


def get_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_supported(config: Any) -> None:
    """Raise ValueError naming whatever in the config this file does not compute."""
    architecture = (config.architectures or ["(none given)"])[0]
    require(architecture in ARCHITECTURES, "architecture", f"one of {', '.join(ARCHITECTURES)}", architecture)
    require(config.hidden_act == "silu", "hidden_act", "'silu'", config.hidden_act)
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    require(not windowed, "layer_types", "full_attention throughout", windowed)
    quantized = getattr(config, "quantization_config", None)
    require(not quantized, "quantization_config", "absent, for weights that are plain floats", quantized)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    ok = kv_heads > 0 and heads % kv_heads == 0
    require(ok, "num_attention_heads", f"a multiple of num_key_value_heads={kv_heads}", heads)


def compute_rope_table(config: Any, max_model_len: int, device: torch.device) -> Tensor:
    """A head's two factors at each position, (cos, cos) for it as it is, (-sin, sin) for it with its halves swapped:
    [max_model_len, 2, head_dim] float32 (Su et al. 2021, "RoFormer"). Types that depend on the length are computed for
    max_model_len, since cached keys cannot be rotated anew. ValueError for unknown types."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

    rope_type, known = config.rope_parameters["rope_type"], ("default", *ROPE_INIT_FUNCTIONS)
    require(rope_type in known, "rope_type", f"one of {', '.join(known)}", rope_type)
    positions = torch.arange(max_model_len, device=device)[None]
    cos, sin = LlamaRotaryEmbedding(config).to(device)(torch.empty(0, device=device), positions)
    head_dim = get_head_dim(config)
    require(cos.shape[-1] == head_dim, "rotary dimensions", f"all {head_dim} of a head", cos.shape[-1])
    return torch.stack((cos[0], rotate_half(sin[0])), dim=1)  # the halves of sin are the same


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed sum of x and residual, and the sum, which is the next residual; all [num_tokens, hidden_size]."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, taken in float32. PyTorch's own rms_norm takes twice as long on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float)
    return (x * (norm.square() / x.shape[-1] + eps).rsqrt()).to(x.dtype) * weight


def norm_and_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim], normed if the model does that, turned by its tokens' angles."""
    x = x if weight is None else rms_norm(x, weight, eps)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class Linear(nn.Linear):
    """The checkpoint's linears over the same input as one matrix product; `parts` names them and sizes their outputs.
    `pack` lays float32 weights out for oneDNN on a CPU: faster than MKL from some 4 rows on, equal but for rounding."""
    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts, self.packed = parts, None

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        self.register_parameter("weight", None)

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


class Attention(nn.Module):
    def __init__(self, config: Any, attend: Attend, ops: SimpleNamespace):
        super().__init__()
        extra = ARCHITECTURES[config.architectures[0]]  # the loader has called check_supported
        self.attend, self.ops, self.head_dim, self.eps = attend, ops, get_head_dim(config), config.rms_norm_eps
        self.heads = num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        parts, bias = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, getattr(config, "attention_bias", False)
        self.qkv_proj = Linear(config.hidden_size, parts, bias or extra == "bias")
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, self.eps) if extra == "norm" else None for _ in range(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_heads, num_kv_heads = self.heads
        qk, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        norms = zip((self.q_norm, self.k_norm), self.heads, strict=True)
        weights = [norm.weight.expand(count, -1) for norm, count in norms if norm is not None]
        weight = torch.cat(weights) if weights else None
        q, k = self.ops.norm_and_rotate(qk, weight, self.eps, *rope).split(self.heads, dim=1)
        store_kv(k, v, kv_cache, metadata.slot_mapping)
        return self.o_proj(self.attend(q, kv_cache, metadata).flatten(1))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, attend: Attend, ops: SimpleNamespace):
        super().__init__()
        self.ops, self.eps = ops, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(config.hidden_size, self.eps)
        self.self_attn = Attention(config, attend, ops)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, self.eps)
        size, bias = config.intermediate_size, getattr(config, "mlp_bias", False)
        gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias)
        down_proj = Linear(size, {"down_proj": config.hidden_size}, bias)
        self.mlp = nn.ModuleDict({"gate_up_proj": gate_up_proj, "down_proj": down_proj})

    def forward(self, x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Attention and a gated MLP. x is still to be added to the residual, as is what is returned in its place."""
        x, residual = self.ops.add_rms_norm(x, residual, self.input_layernorm.weight, self.eps)
        x = self.self_attn(x, *args)
        x, residual = self.ops.add_rms_norm(x, residual, self.post_attention_layernorm.weight, self.eps)
        return self.mlp["down_proj"](self.ops.silu_and_mul(self.mlp["gate_up_proj"](x))), residual


class Decoder(nn.Module):
    def __init__(self, config: Any, attend: Attend, ops: SimpleNamespace):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, attend, ops) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """The whole model. Built on the meta device by the loader, which then fills each parameter once."""
    def __init__(self, config: Any, attend: Attend):
        super().__init__()
        functions = (add_rms_norm, norm_and_rotate, silu_and_mul)  # what lies between the matrix products
        self.ops = SimpleNamespace(**{function.__name__: function for function in functions})
        self.model = Decoder(config, attend, self.ops)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size})
        if config.tie_word_embeddings:
            self.lm_head.register_parameter("weight", None)  # the loader makes it the embedding's
        self.rope_table = torch.empty(0)  # set by the loader: it is computed, not loaded

    def compile_ops(self) -> None:
        """Fuse each into one kernel for one token, and one of dynamic shape for more, when they are first called."""
        for name, function in vars(self.ops).items():
            setattr(self.ops, name, torch.compile(function, dynamic=True))

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor],
                metadata: AttentionMetadata) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of input_ids [num_tokens] at positions [num_tokens]."""
        x = self.model.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        rope = self.rope_table.index_select(0, positions).to(x.dtype).unsqueeze(1).unbind(2)
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rope, kv_cache, metadata)
        return self.ops.add_rms_norm(x, residual, self.model.norm.weight, self.model.norm.eps or 0.0)[0]

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor a checkpoint must bring, by Hugging Face's name, as a view of where it goes."""
        for name, parameter in self.named_parameters():
            *parents, own, kind = name.split(".")
            module = self.get_submodule(".".join((*parents, own)))
            parts = module.parts if isinstance(module, Linear) else {own: len(parameter)}
            for part, piece in zip(parts, parameter.split(list(parts.values())), strict=True):
                yield ".".join((*parents, part, kind)), piece
