"""Formats that others write: what lies where in their files, told without running anything that the files contain."""
