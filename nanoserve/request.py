"""A request and how far it has got.
This module decides what a caller may ask for (`SamplingParams`), what the engine remembers of it (`Request`), and what
the caller gets back (`RequestOutput`). It does not know who is scheduled when, where K/V lies, or what a token means.
Is the sampled token counted yet? The question every reader of a scheduler asks; block size 4, prompt of 5 tokens:

    moment                        num_tokens  num_computed_tokens  blocks
    added                              5               0              0
    schedule() gives it 5              5               5              2    counted when promised, before it is computed
    update_from_output() appends       6               5              2    the sampled token is known, not computed
    schedule() gives it 1              6               6              2    its K/V is written by this step
    update_from_output() appends       7               6              2
    preempted                          7               0              0    outputs stay, K/V is lost
    schedule() gives it 7              7               7              2    recompute (chapter 2.2, section 6.3)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from functools import cache
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

_get_hints = cache(get_type_hints)


def require(ok: bool, name: str, wanted: str, value: object) -> None:
    """Raise a ValueError that names what was given and what it must be, unless it is."""
    if not ok:
        raise ValueError(f"{name} must be {wanted}, got {show(value)}")


def show(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception:  # it holds itself, or a number of too many digits, or is somebody else's
        return f"a {type(value).__name__}"


def require_number(name: str, value: object, integer: bool, low: float, high: float, optional: bool = False) -> None:
    ok = isinstance(value, int if integer else int | float) and not isinstance(value, bool) and low <= value <= high
    wanted = f"{'an integer' if integer else 'a number'} in [{low}, {high}]"
    require(ok or (optional and value is None), name, wanted, value)


def check_options(options: object) -> None:
    """Raise ValueError unless a dataclass's fields are what their annotations say: Annotated[number, lowest, highest],
    a Literal of strings, or a plain type. Other annotations are not looked at."""
    for name, hint in _get_hints(type(options), include_extras=True).items():
        value, args = getattr(options, name, None), get_args(hint)
        if get_origin(hint) is Annotated:
            require_number(name, value, args[0] is not float, *args[1:], optional=args[0] == int | None)
        elif get_origin(hint) is Literal:
            require(type(value) is str and value in args, name, f"one of {', '.join(args)}", value)
        elif hint in (bool, str, bool | None, str | None, dict | None, SamplingParams):
            require(isinstance(value, hint), name, f"a {getattr(hint, '__name__', hint)}", value)


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Whatever the block raises, and libraries raise many things over a bad file, becomes a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens and when to stop. Names, meanings and defaults are vLLM's (sampling_params.py).
    Raises ValueError, naming the value and its limits, on construction."""
    temperature: Annotated[float, 0, 1e6] = 1.0  # 0 is greedy: the largest logit, exactly
    top_p: Annotated[float, 0, 1] = 1.0  # keep the smallest set whose probability reaches top_p
    top_k: Annotated[int, -1, 2**31] = 0  # keep the k largest; 0 or -1: all
    min_p: Annotated[float, 0, 1] = 0.0  # keep tokens at least min_p times as probable as the likeliest
    seed: Annotated[int | None, -(2**63), 2**64 - 1] = None  # the same tokens alone, in any batch, after preemption
    max_tokens: Annotated[int | None, 1, 2**31] = 16  # None: up to max_model_len
    stop: str | Sequence[str] | None = None  # strings that end the output; not part of it
    stop_token_ids: Sequence[int] | None = None  # ids that end the output
    ignore_eos: bool = False
    logprobs: Annotated[int | None, 0, 2**20] = None  # of so many likeliest tokens, besides the sampled one
    skip_special_tokens: bool = True

    def __post_init__(self):
        check_options(self)
        require(self.top_p > 0, "top_p", "in (0, 1]", self.top_p)
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        ok = isinstance(stop, Sequence) and all(isinstance(each, str) and each for each in stop)
        require(ok, "stop", "a non-empty string or a list of them", self.stop)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        ok = isinstance(ids, Sequence) and all(type(each) is int and each >= 0 for each in ids)
        require(ok, "stop_token_ids", "a list of token ids", self.stop_token_ids)
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)  # -1 is none, as in vLLM
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))


class RequestStatus(IntEnum):
    """Where a request stands; everything past PREEMPTED is finished (vLLM v1/request.py)."""
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        return {3: "stop", 4: "length", 5: "abort", 6: "error"}.get(self.value)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way. Once it is queued, only the Scheduler writes to it (vLLM v1/request.py)."""
    request_id: str
    prompt_token_ids: InitVar[Sequence[int]]
    sampling_params: SamplingParams
    priority: Annotated[int, -(2**63), 2**63] = 0  # a smaller value is more important
    arrival_time: Annotated[float, 0, 1e12] = 0.0
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    sort_key: tuple = ()  # set by Scheduler.add_request: smallest is admitted, largest is preempted
    max_num_tokens: int = 0  # set by Scheduler.add_request: the length at which the request ends
    num_computed_tokens: int = 0  # tokens whose K/V is written, or will be by steps already scheduled
    num_in_flight_tokens: int = 0  # of those: tokens of steps scheduled and not yet seen by update_from_output
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    spec_token_ids: list[int] = field(default_factory=list)  # drafts to verify in the next step
    token_ids: list[int] = field(init=False)  # prompt and output in one list
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self, prompt_token_ids: Sequence[int]):
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and every sampled token."""
        return len(self.token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """What num_computed_tokens chases: known tokens and drafts (chapter 2.2, section 6)."""
        return len(self.token_ids) + len(self.spec_token_ids)

    @property
    def num_output_placeholders(self) -> int:
        """Tokens that steps in flight are sampling: each step that reached the end of what was known samples one."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model's own distribution and its rank in it (1: the likeliest)."""
    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of time.time(); None: not yet."""
    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """What a request has produced so far; `index` is always 0, since there is one completion a request."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort" or "error" (logits not finite); None: unfinished
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for EOS and length
    logprobs: list[dict[int, Logprob]] | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as its caller sees it; the shape is vLLM's (outputs.py)."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
