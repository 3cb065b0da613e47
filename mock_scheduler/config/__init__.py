"""The configuration: its schema (``schema``) and how it is loaded (``loading``); imports no torch."""
