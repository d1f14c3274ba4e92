"""Training of any task, in one process or several: loop, checkpoints, sharding, log."""
