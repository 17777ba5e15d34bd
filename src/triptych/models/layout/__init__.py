"""From a media header to placeholder text, rows and grid: arithmetic per family, torch-free."""
