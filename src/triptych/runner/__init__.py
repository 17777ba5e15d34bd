"""Obeys: runs one engine step on the device, exactly as the scheduler decided."""
