"""Moves bytes between the arenas of two processes; knows neither embeddings nor KV blocks."""
