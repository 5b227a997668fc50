"""Whole Hugging Face safetensors from checkpoints, ours and others', off the training path."""
