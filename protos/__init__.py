"""The wire contract: *.proto files, the modules generated from them, and what else both ends share.

See docs/protocol.md.
"""
