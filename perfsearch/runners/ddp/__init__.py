"""DistributedDataParallel's communication, optimizer, loader and process settings."""
