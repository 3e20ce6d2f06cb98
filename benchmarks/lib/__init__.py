"""What the benchmark programs share: flags, cases and rows, implementations of attention, timing, processes, tables."""
