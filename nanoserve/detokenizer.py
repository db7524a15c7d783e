"""Ids to text as it grows, and the stop strings in it.

This module decides which text may be shown. It does not know the model or the schedule: a tokenizer and ids.
"""

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for half a character


class Detokenizer:
    """The text of one request's output; `text` is all of it so far.

    Only a window of the last tokens is decoded for each new one. The window begins with tokens whose text is known, since
    many tokenizers write a token differently at the start of a text than inside it.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], stop: tuple[str, ...], skip_special_tokens: bool):
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._window = prompt_token_ids[-8:]
        self._num_known = len(self._window)
        self._known_text = self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def append(self, token_ids: list[int], finished: bool) -> str | None:
        """Take new ids. Returns the stop string that now ends the text, which is cut before it, or None.

        With several stop strings the leftmost match counts. A character is never shown in part, unless the output
        ends there.
        """
        longest = max(map(len, self._stop), default=0)
        begin = max(0, len(self.text) - longest + 1)
        for token_id in token_ids:
            self._window.append(token_id)
            self._extend(finished=False)
        if finished:
            self._extend(finished=True)
        matches = [(place, stop) for stop in self._stop if (place := self.text.find(stop, begin)) >= 0]
        if not matches:
            return None
        place, stop = min(matches, key=lambda match: match[0])
        self.text = self.text[:place]
        return stop

    def _extend(self, finished: bool) -> None:
        text = self._decode(self._window)
        if len(text) <= len(self._known_text) or (text.endswith(REPLACEMENT) and not finished):
            return
        self.text += text[len(self._known_text) :]
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        self._known_text = self._decode(self._window)

    def shown(self, finished: bool) -> str:
        """The text that no later token can take back: without an end that may yet become a stop string."""
        if not finished:
            for begin in range(max(0, len(self.text) - max(map(len, self._stop), default=0) + 1), len(self.text)):
                if any(stop.startswith(self.text[begin:]) for stop in self._stop):
                    return self.text[:begin]
        return self.text
