"""What differs between model families: tensors here, torch-free layout arithmetic in `layout/`."""
