"""Whole clusters of fake workers in virtual time, under seeded faults.

Everything but the engine, the clock, gRPC's sockets and the page copies is real code. A run that
fails prints its seed; `PAGEWIRE_SEEDS=17 python -m pytest tests/simulation -k decode_dies` runs it
again, and `PAGEWIRE_SEEDS=0:20000` is a soak.
"""
