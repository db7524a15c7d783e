"""Every option of the engine, checked once and never written again.
This module decides which values are possible. It reads no file and asks no device: `for_model` takes a checkpoint's."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from nanoserve.request import check_options, require

MAX = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options with vLLM's names and meanings (vLLM engine/arg_utils.py); `device` and `attention_backend` are ours."""
    model: str  # a local folder, a hub id, or "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # the checkpoint's on CUDA, float32 on a CPU
    max_model_len: Annotated[int | None, 2, MAX] = None  # prompt and output together; None: the model's own limit
    max_num_seqs: Annotated[int, 1, MAX] = 256  # requests running at once
    max_num_batched_tokens: Annotated[int, 1, MAX] = 8192  # one step's token budget
    block_size: Annotated[int | None, 1, MAX] = None  # tokens to a K/V block; None: the attention backend's own
    num_gpu_blocks_override: Annotated[int | None, 1, MAX] = None  # blocks in the cache; None: sized from free memory
    gpu_memory_utilization: Annotated[float, 0, 1] = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # True: no CUDA graphs, nothing compiled
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    speculative_config: dict | None = None  # NgramProposer's arguments; None: no drafts
    async_scheduling: bool | None = None  # schedule a step while the one before runs; None: on CUDA, without drafts
    long_prefill_token_threshold: Annotated[int, 0, MAX] = 0  # longest share of a request; 0: no limit
    load_format: Literal["auto", "dummy"] = "auto"  # "dummy": random weights, nothing but the config is read
    seed: Annotated[int, -(2**63), MAX] = 0
    device: str | None = None  # None: "cuda" if there is one, else "cpu"
    attention_backend: str = "auto"
    hf_config: Any = None  # the checkpoint's transformers config
    vocab_size: int = 0  # ids that may be sampled: the tokenizer's, which can be fewer than the model's rows

    def __post_init__(self):
        if type(self.dtype).__name__ == "dtype":  # torch's, by its name
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_options(self)
        require(not (self.async_scheduling and self.speculative_config), "async_scheduling", "off with drafts", True)

    def for_model(self, hf_config: Any, vocab_size: int) -> "EngineConfig":
        """This config with what the checkpoint decides. Raises ValueError if max_model_len is beyond the model's."""
        rope = getattr(hf_config, "rope_parameters", None) or {}
        limit = hf_config.max_position_embeddings
        if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            limit = max(limit, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or limit)))
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ValueError(f"max_model_len={self.max_model_len} is more than the model's {limit} positions")
        return replace(self, hf_config=hf_config, vocab_size=vocab_size, max_model_len=self.max_model_len or limit)
