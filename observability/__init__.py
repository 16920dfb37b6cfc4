"""Logs, metrics and latency formulas."""
