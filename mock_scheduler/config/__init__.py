"""Configurations of any program: the sections that all runs share, and how one is composed, loaded and checked."""
