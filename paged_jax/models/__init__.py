"""The model: a decoder of the Llama family, and the checkpoints it loads from."""
