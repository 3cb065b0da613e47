"""Answers in ten minutes, on a machine with a GPU and no network, what no machine without one can.

``launch/gpu_check.sh`` starts it; ``docs/gpu.md`` is for whoever runs it. ``__main__`` runs each of the eight checks of
``checks`` as a process of its own and rewrites the report after each. A check is a module with the function ``check``;
it writes each finding as soon as it has it (``findings``).

The driver needs the standard library alone until it has read the machine, so it can say what a machine lacks.
"""
