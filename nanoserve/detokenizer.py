"""Ids to text as it grows, and the stop strings in it.
This module decides which text may be shown. It does not know the model or the schedule: a tokenizer and ids."""

import re
from functools import partial
from os.path import commonprefix
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for half a character
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece spells a byte of a character it has no token for
CONTEXT = 6  # tokens, of a byte at least: any 4 bytes tell where the next character begins


class Detokenizer:
    """The text of one request's output; `text` is what no later token can change. A new token is decoded with a few
    before it, whose text is known: it may be part of a character, and many tokenizers drop a space at the start. A run
    of byte tokens is text when it has ended, since with a broken byte all of it is replaced, whole characters too."""
    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], stop: tuple[str, ...], skip: bool):
        # Ids taken, the prompt's included, and not those after the one that completed a stop string.
        self.text, self.num_read = "", len(prompt_token_ids)
        self._stop, self._tokenizer, self._ended = stop, tokenizer, False
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        added = tokenizer.added_tokens_decoder.items() if skip else ()
        self._skipped = {token_id for token_id, token in added if token.special}
        self._window: list[int] = []
        for token_id in filter(self._spell, reversed(prompt_token_ids)):
            self._window.insert(0, token_id)
            if len(self._window) >= CONTEXT and not BYTE_TOKEN.fullmatch(self._spell(token_id)):
                break
        self._known = self._decode(self._window)  # the part of the window's text that is the prompt's or in `text`

    def append(self, token_ids: list[int], finished: bool) -> str | None:
        """Take new ids. Returns the stop string that now ends the text, which is cut before it, or None: however many
        ids come at once, the first to complete one counts, and of several strings the leftmost. Without stop strings
        they are decoded at once. A character is never shown in part, unless the output ends there."""
        stop = None
        for token_id in token_ids if not self._ended else ():
            self.num_read += 1
            if self._spell(token_id):
                self._window.append(token_id)
                if self._stop and (stop := self._extend(finished=False)):
                    break
        if not (stop or self._ended) and (finished or not self._stop):
            stop = self._extend(finished)
        self._ended = self._ended or finished or stop is not None
        return stop

    def shown(self, finished: bool) -> str:
        """The text that no later token can take back: without an end that may yet become a stop string."""
        starts = (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return self.text if finished else self.text[: len(self.text) - max(starts, default=0)]

    def _extend(self, finished: bool) -> str | None:
        """Look for stop strings in all there is; add to `text` what is certain."""
        in_run = not finished and self._window and BYTE_TOKEN.fullmatch(self._spell(self._window[-1]))
        if in_run and len(self._window) > 4 * CONTEXT:
            return None  # a long run is decoded once, when it has ended
        text = self._decode(self._window)
        # It starts otherwise only where the prompt ended in the middle of a character, which is now whole.
        known = self._known if text.startswith(self._known) else commonprefix((self._known, text))
        text = text if finished else text.removesuffix(REPLACEMENT)
        extended = self.text + text[len(known) :]
        begin = max(0, len(self.text) - max(map(len, self._stop), default=0) + 1)
        matches = [(place, len(stop), stop) for stop in self._stop if (place := extended.find(stop, begin)) >= 0]
        place, _, stop = min(matches, default=(len(extended), 0, None))
        if in_run and not stop:
            return None
        self.text = extended[:place]
        self._known = text if len(text) > len(known) else self._known
        if len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            self._known = self._decode(self._window).removesuffix(REPLACEMENT)
        return stop

    def _spell(self, token_id: int) -> str:
        """How the vocabulary writes a token; "" for one that adds nothing to the text."""
        return "" if token_id in self._skipped else self._tokenizer.convert_ids_to_tokens(token_id) or ""
