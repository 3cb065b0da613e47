"""The games of the stand-in."""
