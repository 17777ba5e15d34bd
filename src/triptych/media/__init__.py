"""Media files as they come: fetch, header, key, and pixels beside the engine thread."""
