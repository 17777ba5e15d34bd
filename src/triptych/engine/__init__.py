"""Decides: which tokens, blocks, pages and loads each step has. Torch-free, no I/O, its clock from outside."""
