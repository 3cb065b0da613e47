"""A small stand-in for reasoning-gym with one of its tasks; ``tests/integrations/test_text.py`` has the real one."""
