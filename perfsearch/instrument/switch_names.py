"""Names of knobs by what of torch takes them. No torch here."""

SWITCHES = ("cudnn_benchmark", "omp_num_threads")
"""Settings that hold for a whole process."""

WRAPPER_KNOBS = (
    "bucket_cap_mb",
    "first_bucket_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
)
SHARDED_KNOBS = ("zero_stage",)
FULLY_SHARD_KNOBS = ("forward_prefetch", "backward_prefetch", "cpu_offload")
FSDP1_KNOBS = ("fsdp_backward_prefetch", "fsdp_forward_prefetch")
LOADER_KNOBS = ("dataloader_workers", "prefetch_factor", "persistent_workers", "pin_memory")
OPTIMIZER_KNOBS = ("optimizer_implementation",)

OF_OBJECTS = frozenset(
    WRAPPER_KNOBS + SHARDED_KNOBS + FULLY_SHARD_KNOBS + FSDP1_KNOBS + LOADER_KNOBS + OPTIMIZER_KNOBS
)
"""Knobs that exist only where a script builds what they belong to."""
