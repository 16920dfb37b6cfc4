"""The terminal: commands, flags, tables and what they print."""
