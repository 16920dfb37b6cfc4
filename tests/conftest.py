"""What holds for every test."""

import signal

from cluster.environment import prepare_ray

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that: those
# that tests start would not notice the one they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that import Ray are collected before those that start it.
prepare_ray(is_local=True)
