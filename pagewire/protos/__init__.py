"""What both ends of a connection share: the modules generated from protos/*.proto, and few others.

It imports nothing else of the project, so every part may import it.
"""
