"""Pages in, tokens out: owns each request from submission to its last token."""
