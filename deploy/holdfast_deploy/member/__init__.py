"""A process of a federation: a node next to its data, or a server."""
