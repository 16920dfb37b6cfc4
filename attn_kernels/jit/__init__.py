"""Triton kernel bodies; nothing else."""
