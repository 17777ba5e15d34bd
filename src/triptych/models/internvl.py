"""InternVL: tiles, which its processor class asks for, not its image processor's settings."""

from collections.abc import Mapping
from typing import Any, ClassVar

from triptych.models.adapter import ModelAdapter


class InternVLAdapter(ModelAdapter):
    processor_options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}
