"""Every option of the engine, checked once and never written again.

This module decides which values are possible. It reads no file and asks no device: what depends on a checkpoint
(`hf_config`, the sizes derived from it) is put in by `EngineConfig.for_model`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from nanoserve.request import require, require_number

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"), "scheduling_policy": ("fcfs", "priority"),
    "load_format": ("auto", "dummy"), "enable_prefix_caching": (True, False), "enforce_eager": (True, False),
    "async_scheduling": (None, True, False),
}  # fmt: skip
_AT_LEAST = {
    "max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1, "num_gpu_blocks_override": 1,
    "long_prefill_token_threshold": 0, "seed": -(2**63),
}  # fmt: skip
_OPTIONAL = ("max_model_len", "block_size", "num_gpu_blocks_override")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options with vLLM's names and meanings (vLLM engine/arg_utils.py); `device` and `attention_backend` are ours."""

    model: str  # a local folder, a hub id, or "demo"
    dtype: str = "auto"  # the checkpoint's on CUDA, float32 on a CPU
    max_model_len: int | None = None  # prompt and output together; None: the model's own limit
    max_num_seqs: int = 256  # requests running at once
    max_num_batched_tokens: int = 8192  # one step's token budget
    block_size: int | None = None  # tokens to a K/V block; None: the attention backend's own
    num_gpu_blocks_override: int | None = None  # blocks in the cache; None: sized from free memory
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # True: no CUDA graphs, nothing compiled
    scheduling_policy: str = "fcfs"
    scheduler_cls: type | None = None  # None: Scheduler or AsyncScheduler
    speculative_config: dict[str, Any] | None = None  # NgramProposer's arguments; None: no drafts
    async_scheduling: bool | None = None  # schedule a step while the one before runs; None: on CUDA, without drafts
    long_prefill_token_threshold: int = 0  # longest share of a request in one step; 0: no limit
    load_format: str = "auto"  # "dummy": random weights, nothing but the config is read
    seed: int = 0
    device: str | None = None  # None: "cuda" if there is one, else "cpu"
    attention_backend: str = "auto"
    hf_config: Any = None  # the checkpoint's transformers config
    vocab_size: int = 0  # ids that may be sampled: the tokenizer's, which can be fewer than the model's rows

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> "EngineConfig":
        """The config for what a caller wrote. Raises ValueError naming an unknown option or an impossible value."""
        known = {field.name for field in fields(cls)} - {"model", "hf_config", "vocab_size"}
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; the options are {', '.join(sorted(known))}")
        dtype = options.get("dtype", "auto")
        dtype = str(dtype).removeprefix("torch.") if type(dtype).__name__ == "dtype" else dtype
        return cls(model=model, **{**options, "dtype": dtype})

    def __post_init__(self):
        require(isinstance(self.model, str) and bool(self.model), "model", "a folder, a hub id or 'demo'", self.model)
        for name, choices in _CHOICES.items():
            ok = any(type(getattr(self, name)) is type(one) and getattr(self, name) == one for one in choices)
            require(ok, name, f"one of {', '.join(map(str, choices))}", getattr(self, name))
        for name, low in _AT_LEAST.items():
            require_number(name, getattr(self, name), True, low, 2**63 - 1, optional=name in _OPTIONAL)
        require_number("gpu_memory_utilization", self.gpu_memory_utilization, False, 0, 1)
        for name in ("device", "attention_backend"):
            require(isinstance(getattr(self, name), str | None), name, "a name", getattr(self, name))
        require(isinstance(self.scheduler_cls, type | None), "scheduler_cls", "a class", self.scheduler_cls)
        drafts = self.speculative_config
        require(drafts is None or isinstance(drafts, dict), "speculative_config", "None or a dict", drafts)
        ahead = self.async_scheduling or getattr(self.scheduler_cls, "runs_ahead", False)
        pair = (self.async_scheduling, self.scheduler_cls)
        name = "async_scheduling, or its scheduler_cls,"
        require(drafts is None or not ahead, name, "off where drafts need the tokens on the host", pair)

    def for_model(self, hf_config: Any, vocab_size: int) -> "EngineConfig":
        """This config with what the checkpoint decides. Raises ValueError if max_model_len is beyond the model's."""
        rope = getattr(hf_config, "rope_parameters", None) or {}
        limit = hf_config.max_position_embeddings
        if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            limit = max(limit, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or limit)))
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ValueError(f"max_model_len={self.max_model_len} is more than the model's {limit} positions")
        return replace(self, hf_config=hf_config, vocab_size=vocab_size, max_model_len=self.max_model_len or limit)
