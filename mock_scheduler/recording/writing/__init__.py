"""Writing a recording: opening it, snapshots, the background queue, shards, forecast and retention."""
