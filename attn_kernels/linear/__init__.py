"""Linear layers whose rows have the same bits in any batch."""
