"""The papers as executable claims: presets to run, and small functions that judge what they recorded."""
