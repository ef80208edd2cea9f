"""The claims of the paper, on real images: `python -m benchmarks.claims --help`."""
