"""Between members: who may connect, what they may ask, and what comes in."""
