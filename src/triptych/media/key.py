"""`media_key`: the name of an item's embeddings. Two items that would embed differently never share one."""

from typing import Annotated

import msgspec
from blake3 import blake3

from triptych.transfer.seal import add_fields

KEY_PATTERN = r"[0-9a-f]{64}"
# In every message between processes, so that no other name reaches a table or a path: a key is a digest made by us.
ItemKey = Annotated[str, msgspec.Meta(pattern=rf"^{KEY_PATTERN}\Z")]

_VERSION = b"triptych media key 2"  # to be raised whenever our own code changes what an item embeds to


def media_key(
    *, modality: str, data: bytes, settings: bytes, layout: bytes, weights_digest: str, dtype: str, tenant_salt: str
) -> str:
    """64 hex digits: blake3 over the fields, each preceded by its length so that no byte can shift from one to the next.

    `data` is the file as it came, `settings` the processor's, `layout` what else the rows depend on (both from the
    `LayoutAdapter`), `weights_digest` and `dtype` the encoder's, `tenant_salt` keeps tenants apart.
    """
    digest = blake3(_VERSION)
    add_fields(digest, (modality.encode(), data, settings, layout, weights_digest.encode(), dtype.encode(), tenant_salt.encode()))
    return digest.hexdigest()
