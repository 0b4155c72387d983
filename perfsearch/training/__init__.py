"""What a rank builds and how its steps are timed: wrappers, sharding, process groups, state."""
