"""Shared GPU code: launchers here, Triton kernel bodies in jit/, slow references in reference.py."""
