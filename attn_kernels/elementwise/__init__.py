"""The norm between matrix products, with the residual before it."""
