"""Rows of a TransferQueue (keys, tags, jagged fields), for every framework that keeps its rollouts in one."""
