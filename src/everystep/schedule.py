"""When a checkpoint is consolidated, where it goes and what it looks like: decisions with reasons. Pure, as ``policy.py`` is."""
