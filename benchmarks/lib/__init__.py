"""What the benchmark programs share: flags, cases and rows, timing in rounds, child processes, tables."""
