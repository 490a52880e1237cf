"""What the benchmarks of single operations share: peers, sizes, the measuring loop, tables and plots."""
