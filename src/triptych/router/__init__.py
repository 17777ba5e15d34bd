"""The HTTP front for clients: renders and tokenises once, leads each request through encode, prefill and decode. Torch-free."""
