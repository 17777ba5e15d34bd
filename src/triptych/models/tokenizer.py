"""A model folder's tokenizer, as the router and the workers use it. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from triptych.errors import ConfigError
from triptych.models.layout.registry import read_json

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(model_dir: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """With every special token that either file names, and what tokenizer_config.json says. Raises `ConfigError`."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"'{model_dir}' has no tokenizer.json; convert the tokenizer to the fast format and save it there.")
    config_path = model_dir / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(_named_special_tokens(config, tokenizer))
    return tokenizer, config


def _named_special_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> list[AddedToken]:
    """Tokens that tokenizer_config.json calls special and tokenizer.json does not; transformers adds them when it loads."""
    extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = list(extra.values()) if isinstance(extra, dict) else list(extra)
    named += [config[name] for name in TOKEN_NAMES if config.get(name)]
    texts = [each["content"] if isinstance(each, dict) else str(each) for each in named]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return [AddedToken(text, special=True) for text in texts if text not in known and tokenizer.token_to_id(text) is not None]
