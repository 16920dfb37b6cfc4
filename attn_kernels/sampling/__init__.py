"""Drawing tokens from logits, without sorting."""
