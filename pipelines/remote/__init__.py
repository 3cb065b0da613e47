"""The learner that trains in a service, and what it must have in common with that."""
