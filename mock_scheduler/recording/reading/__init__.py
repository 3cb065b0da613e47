"""Reads a recording: finds steps, opens them, and checks that they answer a request."""
