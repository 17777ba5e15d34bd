"""Starts, watches and stops the processes of one host: a router, and the workers of a layout."""
