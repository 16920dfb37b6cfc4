"""The running sequences of a decode batch on the device: one seat for each."""
