"""The demo: a small model of coloured shapes, and the pictures it answers about."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
