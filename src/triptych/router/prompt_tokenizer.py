"""`PromptTokenizer`: text to token ids and back, such that only trusted text can become a special token.

Text arrives as it was rendered, with a private mark wherever a user's text could start or complete a special token's string
(`guard` puts them there). Nearly always there is no mark, and the text is encoded in one piece, exactly as transformers
does. With marks, the text is cut at the special tokens that do not touch one, and what lies between is encoded by a second tokenizer
which does not know them.
"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from triptych.errors import RequestError
from triptych.models.tokenizer import load_tokenizer


class PromptTokenizer:
    """`extra_protected` are strings that must be out of a user's reach though the tokenizer does not call them special."""

    def __init__(self, model_dir: Path, extra_protected: Sequence[str] = ()) -> None:
        self._tokenizer, self.config = load_tokenizer(model_dir)
        added = self._tokenizer.get_added_tokens_decoder()
        self._protected = {token.content: id for id, token in added.items() if token.special or token.content in extra_protected}
        self._protected_ids = frozenset(self._protected.values())
        self._pattern = re.compile(
            "|".join(re.escape(each) for each in sorted(self._protected, key=len, reverse=True)) or r"(?!)"
        )
        self._partial_ends = {text[:length] for text in self._protected for length in range(1, len(text))}
        self._partial_starts = {text[-length:] for text in self._protected for length in range(1, len(text))}
        self._longest = max(map(len, self._protected), default=1)
        self._plain = _without(self._tokenizer, set(self._protected))
        self._mark = f"\ue0f0{secrets.token_hex(16)}\ue0f1"

    def guard(self, text: str) -> str:
        """A user's `text` with a mark inside each special token's string, and at an end that others' text could complete to one."""
        text = self._pattern.sub(lambda match: match[0][0] + self._mark + match[0][1:], text.replace(self._mark, ""))
        core = text.strip()  # templates may trim
        if not core:
            return text
        start = text.index(core)
        lead, trail = text[:start], text[start + len(core) :]
        if any(core[:length] in self._partial_starts for length in range(1, self._longest)):
            core = self._mark + core
        if any(core[-length:] in self._partial_ends for length in range(1, self._longest)):
            core += self._mark
        return lead + core + trail

    def find(self, rendered: str, wanted: Collection[str]) -> list[re.Match[str]]:
        """Where the `wanted` special tokens stand in rendered text. One with a mark inside is a user's text, and none."""
        return [match for match in self._pattern.finditer(rendered) if match[0] in wanted]

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Token ids of rendered text with its marks. Raises `RequestError` if a user's text has no ordinary tokens for a special string."""
        trusted = list(self._pattern.finditer(rendered))
        ids = self._tokenizer.encode(rendered.replace(self._mark, ""), add_special_tokens=False).ids
        if sum(id in self._protected_ids for id in ids) == len(trusted):
            return tuple(ids)
        ids = list[int]()
        position = 0
        for match in trusted:
            ids += self._encode_plain(rendered[position : match.start()])
            ids.append(self._protected[match[0]])
            position = match.end()
        return tuple(ids + self._encode_plain(rendered[position:]))

    def _encode_plain(self, piece: str) -> list[int]:
        piece = piece.replace(self._mark, "")
        if not piece:
            return []
        ids = self._plain.encode(piece, add_special_tokens=False).ids
        if self._protected_ids.intersection(ids):
            raise RequestError("the text contains a special token's string, which this model's tokenizer cannot take as text.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_text(self, id: int) -> str:
        """One token by itself, special tokens by name; an incomplete character reads as U+FFFD."""
        return self._tokenizer.decode([id], skip_special_tokens=False)


def _without(tokenizer: Tokenizer, protected: set[str]) -> Tokenizer:
    """The same tokenizer to which the protected tokens are ordinary text."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in protected]
    return Tokenizer.from_str(json.dumps(content))
