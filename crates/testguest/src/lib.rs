//! Tiny guests for tests, demo and benchmarks.
