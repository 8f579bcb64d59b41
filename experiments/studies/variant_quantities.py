"""What ablations measure."""

# Metric to what it is called in figures, and its unit.
QUANTITIES = {
    "capacity": ("capacity at 0.5 s/token", "requests/s"),
    "tokens_per_s": ("output at full load", "tokens/s"),
    "utilization": ("KV utilization at full load", "% of the granted slots"),
    "preempted": ("preemptions at full load", "for each 100 iterations"),
    "latency_p99_s": ("99th percentile of latency", "s/token"),
    "latency_s": ("normalized latency", "s/token"),
    "ttft_s": ("time to the first token", "s"),
    "tpot_s": ("time between tokens", "s"),
}
