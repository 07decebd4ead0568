"""Everything that needs a GPU, in one run of at most ten minutes: `benchmarks/gpu.sh`."""
