"""The running sequences of a decode batch as they lie on the device: one seat for each."""
