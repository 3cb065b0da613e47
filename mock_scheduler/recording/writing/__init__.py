"""Writes a recording: opens it, keeps snapshots, a background queue, shards, forecast and retention."""
