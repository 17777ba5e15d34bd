"""`fetch`: the bytes behind a media part's URL. Data URLs always; http(s) only from hosts that the operator listed.

A server that fetches what strangers name can be made to read its own network. So a host must be on the list, at every redirect; and
where only a pattern names it (`*.example.com`, `*`), its addresses are looked up first, must all be public, and the connection goes to
one of those that were checked, not to what a second look-up might say.
"""

import asyncio
import base64
import binascii
import socket
from contextlib import AbstractAsyncContextManager
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote_to_bytes

import aiohttp
from yarl import URL

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.header import check_nbytes

MAX_REDIRECTS = 5
_REDIRECTS = {301, 302, 303, 307, 308}
_CHUNK_NBYTES = 64 * 1024


async def fetch(url: str, limits: MediaConfig, session: aiohttp.ClientSession) -> bytes:
    """Raises `MediaError` for what cannot or must not be had, `TooLargeError` for more than `limits.max_media_nbytes`."""
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return decode_data_url(url, limits)
    if scheme not in ("http", "https"):
        named = f"'{scheme}:' URLs are" if ":" in url[:20] else f"'{url[:40]}' is no URL; such values are"
        raise MediaError(f"{named} not taken; send a data URL (data:image/png;base64,...) or an http(s) URL.")
    try:
        async with asyncio.timeout(limits.fetch_timeout_s):
            return await _download(_parse(url), limits, session)
    except TimeoutError:
        raise MediaError(
            f"'{_shorten(url)}' took longer than {limits.fetch_timeout_s:g} s; send the picture as a data URL."
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise MediaError(f"'{_shorten(url)}' could not be fetched: {error or type(error).__name__}.") from None


def decode_data_url(url: str, limits: MediaConfig) -> bytes:
    """`data:[type][;name=value]*[;base64],content` (RFC 2397), strictly, but for white space in base64 (it is often cut into lines).

    The type must be a picture's, or left out; what the picture is, its own bytes say.
    """
    head, comma, content = url[5:].partition(",")
    if not comma:
        raise MediaError("the data URL has no comma between its type and its content; write data:image/png;base64,...")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    if media_type and not media_type.startswith("image/"):
        raise MediaError(f"the data URL's type is '{media_type[:40]}'; pictures must be image/*.")
    if parameters and parameters[-1] == "base64":
        return _decode_base64(content, limits)
    if any(parameter == "base64" or "=" not in parameter for parameter in parameters):
        raise MediaError("the data URL's parameters are broken; write data:image/png;base64,...")
    data = unquote_to_bytes(content)
    check_nbytes(len(data), limits)
    return data


def _decode_base64(content: str, limits: MediaConfig) -> bytes:
    encoded = (unquote_to_bytes(content) if "%" in content else content.encode()).translate(None, b" \t\n\f\r")
    check_nbytes(len(encoded) // 4 * 3 - encoded[-2:].count(b"="), limits)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise MediaError(f"the data URL's base64 is broken: {error}.") from None


async def _download(url: URL, limits: MediaConfig, session: aiohttp.ClientSession) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        async with _open(await _check_host(url, limits), url, session) as response:
            if response.status not in _REDIRECTS:
                return await _read(response, url, limits)
            target = response.headers.get("location", "")
        url = url.join(_parse(target))
        if url.scheme not in ("http", "https"):
            raise MediaError(f"'{url.scheme}:' is where a redirect leads to; only http and https are followed.")
    raise MediaError(f"'{_shorten(str(url))}' is behind more than {MAX_REDIRECTS} redirects.")


def _open(address: str | None, url: URL, session: aiohttp.ClientSession) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """To the host, or to its `address` that was checked, still under the host's name (in the header and in TLS)."""
    if address is None:
        return session.get(url, allow_redirects=False)
    port = "" if url.is_default_port() else f":{url.port}"
    headers = {"Host": f"{url.raw_host}{port}"}
    return session.get(url.with_host(address), allow_redirects=False, headers=headers, server_hostname=url.raw_host)


async def _read(response: aiohttp.ClientResponse, url: URL, limits: MediaConfig) -> bytes:
    if response.status != 200:
        raise MediaError(f"'{_shorten(str(url))}' answered {response.status} instead of a picture.")
    check_nbytes(response.content_length or 0, limits)
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_NBYTES):
        data += chunk
        check_nbytes(len(data), limits)
    return bytes(data)


async def _check_host(url: URL, limits: MediaConfig) -> str | None:
    """None when the host itself is listed; a checked public address when a pattern allows it; else `MediaError`."""
    host = (url.host or "").lower().rstrip(".")
    allowed = [domain.lower().rstrip(".") for domain in limits.allowed_domains]
    if host and host in allowed:
        return None
    if not host or not any(_matches(host, pattern) for pattern in allowed):
        raise MediaError(
            f"pictures are not fetched from '{host}'; send a data URL, or have the server started with --allow-media-domain {host}."
        )
    found = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(_is_public(address) for address in addresses):
        raise MediaError(
            f"'{host}' is at a private address; the server must be started with --allow-media-domain {host} to use it."
        )
    return addresses[0]


def _is_public(address: str) -> bool:
    """An IPv4 address written as IPv6 (::ffff:127.0.0.1) is the IPv4 one."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_global


def _matches(host: str, pattern: str) -> bool:
    return pattern == "*" or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _parse(url: str) -> URL:
    try:
        return URL(url)
    except ValueError as error:
        raise MediaError(f"'{_shorten(url)}' is no valid URL: {error}.") from None


def _shorten(url: str) -> str:
    return url if len(url) <= 100 else url[:97] + "..."
