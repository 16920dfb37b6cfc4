"""Shared GPU code: launchers here, kernel bodies in jit/, slow references in reference.py."""
