"""`Detokenizer`: tokens to text as they come, and where a stop string ends it.

Text is given out once it is certain: not while its last character is incomplete (it reads as U+FFFD until its last byte has come), and
not while it could be the beginning of a stop string.
"""

from collections.abc import Sequence

from triptych.router.prompt_tokenizer import PromptTokenizer

INCOMPLETE = "\ufffd"


class Detokenizer:
    """Of one request. Stop strings that end within the first `min_tokens` tokens are not looked for.

    Once one is met, `is_stopped`: it and what follows it are in no text.
    """

    def __init__(self, tokenizer: PromptTokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self.is_stopped = False
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._context = 0  # decoding starts here: the last token before it can change how the next one reads
        self._decoded = 0  # tokens before this have become text
        self._held_back = ""  # text that may become a stop string

    def add(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        self._token_ids.append(token_id)
        before = self._tokenizer.decode(self._token_ids[self._context : self._decoded])
        text = self._tokenizer.decode(self._token_ids[self._context :])
        if len(text) <= len(before) or text.endswith(INCOMPLETE):
            return ""
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return self._release(text[len(before) :])

    def flush(self) -> str:
        """The request has ended otherwise than by a stop string: all that was held back."""
        before = self._tokenizer.decode(self._token_ids[self._context : self._decoded])
        text = self._tokenizer.decode(self._token_ids[self._context :])
        return self._held_back + text[len(before) :]

    def _release(self, new: str) -> str:
        text = self._held_back + new
        if len(self._token_ids) > self._min_tokens:
            ends = [(text.find(stop), stop) for stop in self._stops if stop in text]
            if ends:
                self.is_stopped = True
                return text[: min(ends)[0]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)
