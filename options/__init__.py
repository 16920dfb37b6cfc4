"""How a configuration class declares its options."""
