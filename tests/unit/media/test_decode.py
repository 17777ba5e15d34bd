from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from triptych.media.decode import decode_image

EIGHT_BIT = np.random.default_rng(3).integers(0, 256, (9, 7), dtype=np.uint8)
EIGHT_BIT[0, :2] = 0, 255


def to_png(image: Image.Image, **options: int) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("low_byte", [0, 128, 255])
def test_a_16_bit_grey_picture_has_the_pixels_of_its_8_bit_version(low_byte: int) -> None:
    wide = EIGHT_BIT.astype(np.uint16) * 256 + low_byte
    decoded = np.asarray(decode_image(to_png(Image.fromarray(wide))))
    assert decoded.tolist() == np.asarray(decode_image(to_png(Image.fromarray(EIGHT_BIT)))).tolist()
    assert decoded[..., 0].tolist() == EIGHT_BIT.tolist()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_every_mode_that_pil_has_for_16_bits_is_scaled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
    data = (EIGHT_BIT.astype(np.uint16) * 257).astype(dtype).tobytes()  # 257: 0xAB becomes 0xABAB, as picture editors do
    image = Image.frombytes(mode, (7, 9), data)

    def opened(_: bytes) -> Image.Image:  # PIL's versions differ in the mode that they give a 16-bit PNG
        return image

    monkeypatch.setattr("triptych.media.decode.open_image", opened)
    assert np.asarray(decode_image(b""))[..., 1].tolist() == EIGHT_BIT.tolist()
