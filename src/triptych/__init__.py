"""Triptych: a serving engine for multimodal language models in three pools: encode, prefill and decode."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`LLM` brings torch along (two seconds and 300 MB); the router, and `triptych --help`, import this package without it."""
    if name == "LLM":
        # Late for the reason above.
        from triptych.llm import LLM

        return LLM
    raise AttributeError(f"module 'triptych' has no attribute '{name}'")
