"""Measures: ratios between two things run side by side."""
