"""Messages with pictures, as a client writes them."""

import base64
import io
from random import Random
from typing import Any

from triptych.demo.pictures import Picture, draw, random_picture


def png(picture: Picture) -> bytes:
    buffer = io.BytesIO()
    draw(picture).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(text: str, *urls: str) -> list[Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def fresh_picture(name: str, size: tuple[int, int] = (168, 112)) -> Picture:
    return random_picture(Random(f"serve {name}"), size)
