"""The demo's pieces: a small GPT, its text, the trainer that gets killed, the comparison, and what watches them."""
