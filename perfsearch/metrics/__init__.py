"""System metrics, timings, throughput and diagnosis."""
