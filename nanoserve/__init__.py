"""nanoserve: continuous batching over PagedAttention, small enough to read in an evening.
The names below are imported when first used, so that `import nanoserve` does not wait for torch and transformers."""

from importlib import import_module

_MODULES = {"LLM": "llm", "SamplingParams": "request", "RequestOutput": "request", "CompletionOutput": "request"}
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
    return getattr(import_module(f"nanoserve.{_MODULES[name]}"), name)
