"""Gemma 3: the tokens of a picture see each other, also later ones."""

from typing import ClassVar

from triptych.models.adapter import ModelAdapter


class Gemma3Adapter(ModelAdapter):
    atomic_items: ClassVar[bool] = True
