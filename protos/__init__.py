"""The wire contract: *.proto files and their generator, and code that servers share.

The generated modules are in pagewire.protos. See docs/protocol.md.
"""
