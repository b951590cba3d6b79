"""Benchmarks: what the package costs, against what the machine and stock torch can do. Run by scripts/bench."""
