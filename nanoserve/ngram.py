"""Drafts by prompt lookup: what followed when the same few tokens stood there before (Saxena 2023, "Prompt Lookup
Decoding"; vLLM v1/spec_decode/ngram_proposer.py, whose answers these are). This module decides what is guessed; whether
a guess is right is decided by the model, in the step that computes it."""

from collections.abc import Iterable, Sequence

from nanoserve.request import require, require_number


class NgramProposer:
    """The tokens after the first earlier occurrence of the longest suffix of prompt_lookup_min to _max tokens, by an
    index for each request: a new token costs the same at any length. ValueError for impossible options."""
    def __init__(self, method: str = "ngram", num_speculative_tokens: int = 0,
                 prompt_lookup_max: int | None = None, prompt_lookup_min: int | None = None):
        require(method == "ngram", "speculative_config's method", "'ngram'", method)
        # One bound alone is both, none is 5, as in vLLM.
        bounds = {"prompt_lookup_min": prompt_lookup_min, "prompt_lookup_max": prompt_lookup_max}
        given = {name: bound for name, bound in bounds.items() if bound is not None} or {"prompt_lookup_max": 5}
        for name, value in {"num_speculative_tokens": num_speculative_tokens, **given}.items():
            require_number(name, value, True, 1, 1000)
        low, high = list(given.values())[0], list(given.values())[-1]
        require(low <= high, "prompt_lookup_min", f"at most prompt_lookup_max={high}", low)
        self.num_speculative_tokens, self.lengths = num_speculative_tokens, range(low, high + 1)
        # By request: where each n-gram first ended, and how many tokens were looked at.
        self._seen: dict[str, tuple[dict[tuple[int, ...], int], int]] = {}

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Drafts to follow token_ids, which only ever grow for one request_id; [] if there is nothing to go by.
        >>> NgramProposer("ngram", 3, prompt_lookup_max=2, prompt_lookup_min=1).propose("r", [7, 8, 9, 5, 7, 8])
        [9, 5, 7]
        """
        num_tokens, (index, num_seen) = len(token_ids), self._seen.get(request_id, ({}, 0))
        for end in range(num_seen + 1, num_tokens + 1):
            for n in self.lengths[: max(0, end - self.lengths[0] + 1)]:
                index.setdefault(tuple(token_ids[end - n : end]), end)
        self._seen[request_id] = index, num_tokens
        for n in reversed(self.lengths[: max(0, num_tokens - self.lengths[0] + 1)]):
            if (end := index[tuple(token_ids[num_tokens - n :])]) < num_tokens:
                return list(token_ids[end : end + self.num_speculative_tokens])
        return []

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._seen.pop(request_id, None)
