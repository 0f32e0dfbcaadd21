"""A member's directory: messages and states as files, and what is left for its people."""
