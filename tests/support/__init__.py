"""Builders, fakes and the virtual-time event loop that tests share."""
