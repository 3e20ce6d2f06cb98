"""Benchmark programs, to be run as scripts: each is one sweep and one `main()`."""
