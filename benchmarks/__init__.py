"""Workloads and one script per published table."""
