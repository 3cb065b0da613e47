"""slime, and the frameworks made of it: miles, vime and Relax. ``docs/frameworks/slime.md`` has the lines to add."""
