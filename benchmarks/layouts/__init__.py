"""Training under every layout and computation option, compared with one process; the table of ``docs/layouts.md``."""
