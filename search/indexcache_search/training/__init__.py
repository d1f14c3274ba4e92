"""Training whatever a task says, in one process or several: loop, checkpoints, sharding, log."""
