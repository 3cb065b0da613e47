"""NexRL's debug dump of a run that trains by itself, and rollouts read from one."""
