"""One worker process: an HTTP front, an engine thread, a pool that prepares media."""
