"""The same algorithms between real machines: one node next to its own data, messages over mutual TLS."""
