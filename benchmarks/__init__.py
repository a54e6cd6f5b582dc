"""Ratios measured side by side; `python -m benchmarks.run` runs all of them."""
