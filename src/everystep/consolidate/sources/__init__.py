"""Checkpoints that can be consolidated, one module for each who writes them."""
