"""What runs in the training process; the only room besides integrations and bench that imports torch."""
